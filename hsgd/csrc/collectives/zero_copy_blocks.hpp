// What one rank does of broadcast, allgather, reduce_scatter and alltoall where the data of all
// ranks lies in shared buffers.
//
// Owns the copies and sums: each input is read once by who needs it, and written straight to where
// it belongs. Each function is the work of a DirectWork, which waits before and after; nothing here
// does. On one node, where the place of a rank is its local rank.
#ifndef HSGD_COLLECTIVES_ZERO_COPY_BLOCKS_HPP_
#define HSGD_COLLECTIVES_ZERO_COPY_BLOCKS_HPP_

#include <vector>

#include "collectives/zero_copy.hpp"
#include "internode/rank_blocks.hpp"

namespace hsgd {

// This rank's part of `bytes` of the root's, to all others. `arguments.out`: the buffers.
void broadcast_part(const PipelineContext& context, const SharedArguments& arguments, int root,
                    size_t bytes, CopyFn copy);

// `blocks` of all ranks, whose inputs they are, to this rank's `out`.
void join_blocks(const PipelineContext& context, const SharedArguments& arguments,
                 const std::vector<Block>& blocks, size_t element_bytes, CopyFn copy, void* out);

// This rank's block of the sum of all inputs to `out`.
void reduce_block(const PipelineContext& context, const SharedArguments& arguments,
                  const Block& block, const Reduction& reduction, void* out);

// Where in its own segment the input of a rank has what is for each other one, for pick_blocks() of
// these: written into the slot of the step, before the collective is opened.
void tell_places(const PipelineContext& context, const Block* sent, const std::byte* in,
                 const SharedBuffer& buffer, size_t element_bytes);

// What is for this rank, from the inputs of all ranks, to its `out`: `received` by rank.
void pick_blocks(const PipelineContext& context, const SharedBuffer& buffer,
                 const std::vector<Block>& received, size_t element_bytes, CopyFn copy, void* out);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_ZERO_COPY_BLOCKS_HPP_
