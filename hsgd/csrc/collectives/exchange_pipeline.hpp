// The chunk pipelines of allgather and alltoall: stage, exchange between nodes, collect.
//
// Owns the order of work on one rank: in each step a rank stages what others need of its input in
// its in ring; leaders send that to the nodes that need it, where it lands in the node's only out
// ring; and each rank copies what it needs from its peers' in rings and from the out ring. So each
// byte crosses a link once per node that needs it, and inside a node costs 4 accesses (2 in, 2
// out). Each pipeline is a state machine whose step() never blocks.
#ifndef HSGD_COLLECTIVES_EXCHANGE_PIPELINE_HPP_
#define HSGD_COLLECTIVES_EXCHANGE_PIPELINE_HPP_

#include <cstdint>
#include <vector>

#include "collectives/pipeline.hpp"
#include "internode/rank_blocks.hpp"
#include "internode/step_messages.hpp"

namespace hsgd {

class ExchangePipeline : public Pipeline {
 public:
  bool stage_first() final;
  Step step(Permission permission) final;

 protected:
  // `wire`: on leaders of several nodes, else nullptr.
  ExchangePipeline(const PipelineContext& context, const NodeMap& map, uint64_t steps, CopyFn copy,
                   StepMessages* wire);
  // Stages this rank's part of a step; returns the bytes written. May touch the output only when
  // the permission is granted.
  virtual uint64_t fill(uint64_t step, std::byte* slot, Permission permission) = 0;
  // Posts the sends of what the rank at `place`, on this node, has staged in `slot` for others.
  virtual void send(uint64_t step, int place, const std::byte* slot) = 0;
  // Posts the receive of what the rank at `place`, on another node, sends in a step.
  virtual void receive(uint64_t step, int place) = 0;
  // How much of that has arrived, when the step is complete.
  virtual uint64_t received_bytes(uint64_t step, int place) = 0;
  // Copies what this rank needs of a step; returns the bytes read.
  virtual uint64_t collect(uint64_t step) = 0;

  std::byte* in_slot(int local_rank, uint64_t step) const {
    return context_.local.in_slot(local_rank, context_.base + step);
  }
  std::byte* landing(uint64_t step) const {  // the node's slot for what comes from other nodes
    return context_.local.out_slot(0, context_.base + step);
  }
  PipelineContext context_;
  const NodeMap& map_;
  CopyFn copy_;
  StepMessages* wire_;

 private:
  bool try_stage(Permission permission);
  bool try_exchange();
  bool try_collect();
  void post(uint64_t step);
  void count_received(uint64_t step);
  // Whether this leader sends, or receives, what the rank at `place` sends to other nodes.
  bool carries(int place) const {
    return (place - map_.first(map_.node_at(place))) % context_.leaders == context_.local.rank();
  }

  uint64_t steps_;
  uint64_t staged_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t collected_ = 0;
};

class AllgatherPipeline final : public ExchangePipeline {
 public:
  // `in`: this rank's block, perhaps at its place in `out`.
  // `copy_twice`: select_reduce(HSGD_UINT8), whose one-input form writes two copies in one pass.
  AllgatherPipeline(const PipelineContext& context, const void* in, void* out,
                    const BlockTable& table, size_t element_bytes, CopyFn copy, ReduceFn copy_twice,
                    StepMessages* wire);

 private:
  uint64_t fill(uint64_t step, std::byte* slot, Permission permission) override;
  void send(uint64_t step, int place, const std::byte* slot) override;
  void receive(uint64_t step, int place) override;
  uint64_t received_bytes(uint64_t step, int place) override;
  uint64_t collect(uint64_t step) override;
  const std::byte* own_input(const Range& piece) const {
    return in_ + (piece.begin - table_.block(map_.place()).begin) * size_;
  }
  std::byte* landed(uint64_t step, int place) const {
    return landing(step) + table_.offset(place, step) * size_;
  }

  const std::byte* in_;
  std::byte* out_;
  const BlockTable& table_;
  size_t size_;  // of an element
  ReduceFn copy_twice_;
  uint64_t early_ = 0;  // steps staged before the output might be touched
};

// How the slots of an alltoall are laid out: for each node a block with one segment per rank of it.
// Slots and blocks begin with offsets, so that nobody needs to know how much others send one
// another.
//
//   slot:  where the block of each node begins, and the end | block | block | ...
//   block: where the segment of each of its ranks begins, and the end | segment | segment | ...
class AlltoallShape {
 public:
  AlltoallShape(const NodeMap& map, size_t chunk_bytes);
  // The steps that what this rank sends needs, `counts` by rank, so that it fits everywhere.
  uint64_t steps_needed(const uint64_t* counts, size_t element_bytes) const;
  size_t unit_bytes() const { return unit_bytes_; }
  size_t slot_header_bytes() const;
  size_t block_header_bytes(int node) const;
  // What one remote rank may send to a node in one step.
  size_t landing_bytes(int node) const;
  // Where that of `place` lands on this node.
  size_t landing_offset(int place) const;

 private:
  const NodeMap& map_;
  size_t chunk_bytes_;
  size_t unit_bytes_;  // cache lines, unless so many ranks share a step that too little remains
};

class AlltoallPipeline final : public ExchangePipeline {
 public:
  // `sent` and `received` by place, not cut yet.
  AlltoallPipeline(const PipelineContext& context, const void* in, void* out,
                   std::vector<Block> sent, std::vector<Block> received, uint64_t steps,
                   const AlltoallShape& shape, const NodeMap& map, size_t element_bytes,
                   CopyFn copy, StepMessages* wire);

 private:
  uint64_t fill(uint64_t step, std::byte* slot, Permission permission) override;
  uint64_t fill_block(uint64_t step, int node, std::byte* block, uint64_t* payload_bytes);
  void send(uint64_t step, int place, const std::byte* slot) override;
  void receive(uint64_t step, int place) override;
  uint64_t received_bytes(uint64_t step, int place) override;
  uint64_t collect(uint64_t step) override;

  const std::byte* in_;
  std::byte* out_;
  std::vector<Block> sent_;
  std::vector<Block> received_;
  const AlltoallShape& shape_;
  size_t size_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_EXCHANGE_PIPELINE_HPP_
