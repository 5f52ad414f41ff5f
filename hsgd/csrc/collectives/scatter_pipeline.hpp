// The chunk pipeline of reduce_scatter: stage, reduce, exchange between nodes, take.
//
// Owns the order of work on one rank. Each element is summed as in an allreduce: local ranks in
// order, then nodes in order. On one node a rank stages all but its own pieces and reduces those
// straight into its output. Between nodes the ranks of a node share the reduction of all pieces,
// leaders send each node the sums that its ranks need, narrowed where that is asked for, add in
// node order, and each rank takes its piece. A state machine whose step() never blocks.
#ifndef HSGD_COLLECTIVES_SCATTER_PIPELINE_HPP_
#define HSGD_COLLECTIVES_SCATTER_PIPELINE_HPP_

#include <cstdint>
#include <vector>

#include "collectives/pipeline.hpp"
#include "internode/rank_blocks.hpp"
#include "internode/step_messages.hpp"

namespace hsgd {

class ReduceScatterPipeline final : public Pipeline {
 public:
  // `in`: all blocks in rank order; `out`: this rank's block, perhaps at its place in `in`. `wire`
  // and `mailboxes`: on leaders of several nodes.
  ReduceScatterPipeline(const PipelineContext& context, const void* in, void* out,
                        const BlockTable& table, const Reduction& reduction, StepMessages* wire,
                        const Mailboxes& mailboxes);
  bool stage_first() override;
  Step step(Permission permission) override;
  // The steps in which all pieces fit into the slots of `chunk_bytes`, and so into the inboxes.
  static uint64_t steps_needed(const BlockTable& table, size_t chunk_bytes, size_t element_bytes);

 private:
  bool try_stage();
  bool try_reduce();
  bool try_exchange();
  bool try_take();
  Range reduced_here(uint64_t step) const;
  void reduce(uint64_t step, int place, const Range& part, std::byte* out, double divisor,
              Store store);
  void post(uint64_t step);
  void add_nodes(uint64_t step);
  Range own_section(uint64_t step, int node) const;
  uint64_t own_begin() const { return table_.block(map_.place()).begin; }
  std::byte* sums(uint64_t step) const { return context_.local.out_slot(0, context_.base + step); }
  std::byte* inbox(uint64_t step, int node) const {
    return mailboxes_.in + part_index(step, node) * mailboxes_.in_bytes;
  }
  std::byte* outbox(uint64_t step, int node) const {
    return mailboxes_.out + part_index(step, node) * mailboxes_.out_bytes;
  }
  size_t part_index(uint64_t step, int node) const {
    return step % context_.slots * static_cast<size_t>(map_.nodes()) + static_cast<size_t>(node);
  }
  const std::byte* narrowed_section(uint64_t step, int node);

  PipelineContext context_;
  const std::byte* in_;
  std::byte* out_;
  const BlockTable& table_;
  const NodeMap& map_;
  Reduction reduction_;
  size_t size_;  // of an element
  StepMessages* wire_;
  Mailboxes mailboxes_;
  size_t sent_size_;  // of an element between nodes
  uint64_t staged_ = 0;
  uint64_t reduced_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t taken_ = 0;
  std::vector<const void*> inputs_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_SCATTER_PIPELINE_HPP_
