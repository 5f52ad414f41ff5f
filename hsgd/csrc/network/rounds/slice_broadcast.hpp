// What one node has goes to all.
//
// Owns the order of messages. In each round the root, and who has got a part from it, splits that
// among its group; in the same rounds backwards all pass on what they have: scatter and allgather
// (van de Geijn, "On global combine operations", Journal of Parallel and Distributed Computing 22,
// 1994). The root's group of the first round has no part of its own and gets all from the others,
// so that the root sends each byte once, and no node much more. Never touches flags in shared
// memory and never blocks.
#ifndef HSGD_NETWORK_ROUNDS_SLICE_BROADCAST_HPP_
#define HSGD_NETWORK_ROUNDS_SLICE_BROADCAST_HPP_

#include <cstddef>
#include <vector>

#include "network/rounds/reduction.hpp"
#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"

namespace hsgd {

class SliceBroadcast final : public BroadcastSteps, public RoundPayload {
 public:
  SliceBroadcast(Transport& transport, const RoundSchedule& rounds, size_t slots,
                 WireCounters& counters);
  void start(int root_node) override;
  bool is_root() const override { return node_ == root_; }
  void begin(std::byte* data, size_t bytes) override;
  // What the root splits may travel with the headers, but not what puts it together.
  RoundPayload* with_headers() override;
  size_t write(int round, int core, std::byte* out) override;
  void merge(int round, const std::vector<Payload>& parts) override;

 private:
  enum class Kind { kTake, kScatter, kSpread, kGive };
  struct Stage {
    Kind kind;
    int round;
  };
  struct Slice {
    explicit Slice(Transport& transport) : messages(transport) {}
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool is_split = false;  // with the headers
    Messages messages;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  void post(Slice& slice, const Stage& stage);
  void post_fold(Slice& slice, Kind kind);
  void post_scatter(Slice& slice, int round);
  void post_spread(Slice& slice, int round);
  // Whether a core has got from the root all that it has to do with before a round.
  bool holds(int core, int round) const;
  // What `core` gets from the root in a round, for itself and others.
  Range part(const Slice& slice, int round, int core) const;
  bool folds_root() const { return !rounds_.is_core(root_); }
  size_t offset(const Slice& slice, int leaf) const;

  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const int node_;
  const int partner_;
  const int core_;  // of this node or its partner
  int root_ = 0;
  int root_core_ = 0;
  std::vector<Stage> stages_;
  std::vector<Slice> slices_;
  bool next_rides_ = false;
  Slice* riding_ = nullptr;  // that travels with the headers
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_SLICE_BROADCAST_HPP_
