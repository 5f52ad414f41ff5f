// What every node has goes to all.
//
// Owns the order of messages. In each round the nodes of a group send one another what they have
// after earlier ones (recursive doubling, of any radix); with one round that is direct exchange. A
// node sends and receives (N - 1) / N of the bytes, where all have the same. Never touches flags in
// shared memory and never blocks.
#ifndef HSGD_INTERNODE_SLICE_ALLGATHER_HPP_
#define HSGD_INTERNODE_SLICE_ALLGATHER_HPP_

#include <cstddef>
#include <vector>

#include "internode/messages.hpp"
#include "internode/round_schedule.hpp"

namespace hsgd {

class SliceAllgather final : public StepWindow {
 public:
  SliceAllgather(Transport& transport, const RoundSchedule& rounds, size_t slots,
                 WireCounters& counters);
  void start() { restart(); }
  // The next step: this node's part of `data`, to which those of the others come. `begins`: where
  // the part of each node begins, in bytes, and the end of all; parts lie without gaps in the order
  // of RoundSchedule::nodes_by_leaf().
  void begin(std::byte* data, std::vector<size_t> begins);

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
    Messages messages;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  void post(Slice& slice, const Stage& stage);
  void post_fold(Slice& slice, Kind kind);
  size_t offset(const Slice& slice, int leaf) const;

  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const int node_;
  const int partner_;
  std::vector<Stage> stages_;
  std::vector<Slice> slices_;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_SLICE_ALLGATHER_HPP_
