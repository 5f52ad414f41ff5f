// The sum of slices over nodes.
//
// Owns the order of messages and sums between nodes. Each part of a slice goes to its owner, who
// adds in node order (direct exchange): every element is summed in one fixed order, whatever the
// chunking, and a node sends and receives 2 (N - 1) / N of the bytes. Never touches flags in shared
// memory and never blocks.
#ifndef HSGD_INTERNODE_SLICE_ALLREDUCE_HPP_
#define HSGD_INTERNODE_SLICE_ALLREDUCE_HPP_

#include <cstdint>
#include <memory>
#include <vector>

#include "internode/messages.hpp"
#include "internode/reduction.hpp"

namespace hsgd {

// The memory in which a leader receives what other nodes send and, where that is not as it lies in
// the rings, prepares what it sends: for each slot one part per node.
struct Mailboxes {
  std::byte* in = nullptr;
  size_t in_bytes = 0;       // of a part
  std::byte* out = nullptr;  // for what is narrowed
  size_t out_bytes = 0;
};

class SliceAllreduce final : public StepWindow {
 public:
  // `slice_bytes`: the largest slice of one step; `slots`: steps in flight; `narrows`: some
  // reductions will narrow, which takes memory.
  SliceAllreduce(Transport& transport, size_t slice_bytes, size_t slots, bool narrows,
                 WireCounters& counters);
  void start(const Reduction& reduction);
  // The sums of this node in a slice of the next step; those over all nodes replace them.
  void begin(std::byte* sums, uint64_t count);
  // For other exchanges while this one rests.
  Mailboxes mailboxes() const {
    return {inboxes_.get(), part_bytes_, outboxes_.get(), out_part_bytes_};
  }

 private:
  enum Phase { kScatter, kGather };
  struct Slice {
    explicit Slice(Transport& transport)
        : receives(transport), sends(transport), results(transport) {}
    std::byte* sums = nullptr;
    uint64_t count = 0;
    std::byte* data = nullptr;    // what is sent: the sums, or they narrowed
    std::byte* inbox = nullptr;   // parts of other nodes
    std::byte* outbox = nullptr;  // for the narrowed slice
    Messages receives;
    Messages sends;
    Messages results;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  bool scatter(Slice& slice, int& phase, bool is_first);
  bool gather(Slice& slice, int& phase);
  Range part_at(const Slice& slice, int node) const;
  void reduce_own_part(Slice& slice);
  void spread_own_part(Slice& slice);

  Transport& transport_;
  WireCounters& counters_;
  size_t part_bytes_;
  size_t out_part_bytes_;
  Reduction reduction_;
  size_t element_bytes_ = 0;  // as sent
  std::unique_ptr<std::byte[]> inboxes_;
  std::unique_ptr<std::byte[]> outboxes_;
  std::vector<Slice> slices_;
  std::vector<const void*> inputs_;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_SLICE_ALLREDUCE_HPP_
