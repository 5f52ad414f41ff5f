// SliceAllreduce: sums slices over nodes, for all nodes or each node's part for itself.
//
// In each round the nodes of a group split their data among them, and each sums its part over the
// group (recursive halving, of any radix); in the same rounds backwards the sums go to all nodes:
// Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. A reduce_scatter uses
// the first half, with parts of any size. With one round this is direct exchange. Every element is
// summed in the order of the schedule, with any chunking, and a node sends and receives (N - 1) / N
// of the bytes in each half. Never touches flags in shared memory and never blocks.
#ifndef HSGD_NETWORK_ROUNDS_SLICE_ALLREDUCE_HPP_
#define HSGD_NETWORK_ROUNDS_SLICE_ALLREDUCE_HPP_

#include <cstdint>
#include <memory>
#include <vector>

#include "network/rounds/reduction.hpp"
#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"

namespace hsgd {

class SliceAllreduce final : public StepWindow, public RoundPayload {
 public:
  // `slice_bytes`: the largest slice of one step; `slots`: steps in flight; `narrows`: some
  // reductions use a 16-bit format, which needs memory.
  SliceAllreduce(Transport& transport, const RoundSchedule& rounds, size_t slice_bytes,
                 size_t slots, bool narrows, WireCounters& counters);
  // Returns the most bytes that one node sends another in a round.
  static size_t most_part_bytes(const RoundSchedule& rounds, size_t slice_bytes);
  // Returns the bytes that such an object allocates for receives and narrowed slices.
  static size_t buffer_bytes(const RoundSchedule& rounds, size_t slice_bytes, size_t slots,
                             bool narrows);
  // kWhole: all sums for all nodes; kParts: each node gets its part.
  enum class Form { kWhole, kParts };
  void start(const Reduction& reduction, Form form = Form::kWhole);
  // Begins the next step with this node's sums of a slice; the sums over all nodes replace them.
  void begin(std::byte* sums, uint64_t count);
  // Does the same for parts: the sums over all nodes replace this node's part, the rest is
  // overwritten. `begins`: where each node's part begins, in elements, from 0, and the end; parts
  // lie without gaps in the order of RoundSchedule::nodes_by_leaf(). A core and its partner
  // together have at most an equal share of the largest slice.
  void begin_parts(std::byte* sums, std::vector<uint64_t> begins);
  // The sums of a step can travel with the headers, but the messages that spread them cannot.
  RoundPayload* with_headers() override;
  size_t write(int round, int core, std::byte* out) override;
  void merge(int round, const std::vector<Payload>& parts) override;

 private:
  enum class Kind { kTake, kSum, kSpread, kGive };
  struct Stage {
    Kind kind;
    int round;
  };
  struct Slice {
    explicit Slice(Transport& transport) : messages(transport) {}
    std::byte* sums = nullptr;
    uint64_t count = 0;
    std::vector<uint64_t> begins;  // of parts, by node
    std::byte* data = nullptr;     // what is sent: the sums, or their narrowed form
    bool is_wide = false;          // until all nodes are in the sums, they lie in `wide`
    bool is_summed = false;        // by messages with the headers
    std::byte* inbox = nullptr;
    std::byte* outbox = nullptr;  // for the narrowed slice
    float* wide = nullptr;        // for sums of 16-bit floats over some nodes
    Messages messages;
  };
  // Buffers of one slot.
  struct Buffers {
    Buffers(const RoundSchedule& rounds, size_t slice_bytes, bool narrows);
    size_t part_bytes;    // from one node of a group
    size_t inbox_bytes;   // from all of a group
    size_t outbox_bytes;  // more than a narrowed slice
    size_t wide_count;
  };
  Slice& next_slice(std::byte* sums, uint64_t count);
  void begin_slice(Slice& slice);
  bool advance(size_t slot, int& phase, bool is_first) override;
  void post(Slice& slice, const Stage& stage);
  void post_sum(Slice& slice, int round);
  void finish(Slice& slice, const Stage& stage);
  void finish_sum(Slice& slice, int round);
  void reduce(Slice& slice, const Range& part, bool is_last);
  void reduce_widened(Slice& slice, const Range& part);
  void post_fold(Slice& slice, Kind kind);
  // Returns the range of the result that a node gets.
  Range result_of(const Slice& slice, int node) const;
  // Returns the range that `core` handles before a round.
  Range range(const Slice& slice, int round, int core) const;
  uint64_t bound(const Slice& slice, int leaf) const;
  std::byte* arriving(const Slice& slice, int index, const Range& part) const;
  std::byte* partial_sums(const Slice& slice) const;
  size_t partial_bytes(const Slice& slice) const;  // of one element

  Transport& transport_;
  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const int node_;
  const int core_;  // -1: this node takes no part in the rounds
  const int partner_;
  std::vector<Stage> stages_;
  const Buffers buffers_;
  Reduction reduction_;
  size_t element_bytes_ = 0;  // as sent, except wide sums
  bool widens_ = false;
  Form form_ = Form::kWhole;
  std::unique_ptr<std::byte[]> inboxes_;
  std::unique_ptr<std::byte[]> outboxes_;
  std::unique_ptr<float[]> wide_;
  std::vector<Slice> slices_;
  bool next_rides_ = false;
  Slice* riding_ = nullptr;  // the step that travels with the headers
  std::vector<const void*> inputs_;
  std::vector<float> widened_;  // a block of each input
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_SLICE_ALLREDUCE_HPP_
