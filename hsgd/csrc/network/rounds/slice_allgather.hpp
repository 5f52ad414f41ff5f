// SliceAllgather: each node gets the slices of all nodes.
//
// In each round the nodes of a group send one another what they have after earlier rounds
// (recursive doubling, of any radix); with one round this is direct exchange. A node sends and
// receives (N - 1) / N of the bytes if all nodes contribute equally. Never touches flags in shared
// memory and never blocks.
#ifndef HSGD_NETWORK_ROUNDS_SLICE_ALLGATHER_HPP_
#define HSGD_NETWORK_ROUNDS_SLICE_ALLGATHER_HPP_

#include <cstddef>
#include <vector>

#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"

namespace hsgd {

class SliceAllgather final : public StepWindow, public RoundPayload {
 public:
  SliceAllgather(Transport& transport, const RoundSchedule& rounds, size_t slots,
                 WireCounters& counters);
  void start() { restart(); }
  // Begins the next step: `data` holds this node's part, and receives those of the others.
  // `begins`: offset in bytes of each node's part, and the end; parts lie without gaps in the order
  // of RoundSchedule::nodes_by_leaf().
  void begin(std::byte* data, std::vector<size_t> begins);
  // A step can travel with the headers, in forward rounds: cores then send one another all that
  // they have from earlier rounds. fits() returns true if no message is longer than `most_bytes`.
  RoundPayload* with_headers() override;
  bool fits(const std::vector<size_t>& begins, size_t most_bytes) const;
  size_t write(int round, int core, std::byte* out) override;
  void merge(int round, const std::vector<Payload>& parts) override;

 private:
  enum class Kind { kTake, kSpread, kGive };
  struct Stage {
    Kind kind;
    int round;
  };
  struct Slice {
    explicit Slice(Transport& transport) : messages(transport) {}
    std::byte* data = nullptr;
    std::vector<size_t> begins;
    bool has_all = false;  // on cores: received with the headers
    Messages messages;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  void post(Slice& slice, const Stage& stage);
  void post_fold(Slice& slice, Kind kind);
  size_t offset(const std::vector<size_t>& begins, int leaf) const;
  // Calls handle(begin, end) for each part that `core` has before a forward round.
  template <class Handle>
  void for_each_held(const std::vector<size_t>& begins, int round, int core, Handle&& handle) const;

  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const int node_;
  const int partner_;
  const int core_;  // this node's core or its partner's
  std::vector<Stage> stages_;
  std::vector<int> node_at_leaf_;
  std::vector<Slice> slices_;
  bool next_rides_ = false;
  Slice* riding_ = nullptr;  // the step that travels with the headers
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_SLICE_ALLGATHER_HPP_
