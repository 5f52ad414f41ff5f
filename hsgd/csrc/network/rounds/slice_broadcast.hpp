// SliceBroadcast: sends the data of one node to all nodes.
//
// In each round the root, and each node that has received a part, splits its data among its group;
// in the same rounds backwards all pass on what they have: scatter and allgather (van de Geijn, "On
// global combine operations", Journal of Parallel and Distributed Computing 22, 1994). The root's
// group of the first round has no part of its own and gets all from the others, so the root sends
// each byte once, and no node sends much more. Never touches flags in shared memory and never
// blocks.
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
  // The split of a step can travel with the headers, but the messages that join the parts cannot.
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
    bool is_split = false;  // by messages with the headers
    Messages messages;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  void post(Slice& slice, const Stage& stage);
  void post_fold(Slice& slice, Kind kind);
  void post_scatter(Slice& slice, int round);
  void post_spread(Slice& slice, int round);
  // Returns true if a core has received from the root all that it handles before a round.
  bool holds(int core, int round) const;
  // Returns the part that `core` gets from the root in a round, for itself and others.
  Range part(const Slice& slice, int round, int core) const;
  bool folds_root() const { return !rounds_.is_core(root_); }
  size_t offset(const Slice& slice, int leaf) const;

  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const int node_;
  const int partner_;
  const int core_;  // this node's core or its partner's
  int root_ = 0;
  int root_core_ = 0;
  std::vector<Stage> stages_;
  std::vector<Slice> slices_;
  bool next_rides_ = false;
  Slice* riding_ = nullptr;  // the step that travels with the headers
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_SLICE_BROADCAST_HPP_
