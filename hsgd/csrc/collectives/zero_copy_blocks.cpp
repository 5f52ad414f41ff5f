// Copies and sums from and to the buffers of other ranks.
#include "collectives/zero_copy_blocks.hpp"

#include <algorithm>
#include <cstring>

namespace hsgd {
namespace {

// What is copied to several places is in the nearest cache after the first.
constexpr size_t kBlockBytes = 16 << 10;

// The other ranks, beginning with another one on each, so that not all read from the same one; this
// rank comes last.
int turn(const PipelineContext& context, int i) {
  return (context.local.rank() + 1 + i) % context.local.size();
}

// Offsets of what one rank sends to all others, as they lie in its slot.
std::byte* places(const PipelineContext& context, int rank) {
  return context.local.in_slot(rank, context.base);
}

}  // namespace

void broadcast_part(const PipelineContext& context, const SharedArguments& arguments, int root,
                    size_t bytes, CopyFn copy) {
  const int size = context.local.size();
  const Range part = part_of(bytes, size, context.local.rank(), 1);
  const std::byte* from = arguments.out[static_cast<size_t>(root)];
  for (size_t begin = part.begin; begin < part.end; begin += kBlockBytes) {
    const size_t length = std::min<size_t>(kBlockBytes, part.end - begin);
    for (int i = 0; i < size; ++i) {
      const int to = turn(context, i);
      if (to == root) continue;
      copy(arguments.out[static_cast<size_t>(to)] + begin, from + begin, length, context.out_store);
    }
  }
  *context.intra_bytes += static_cast<uint64_t>(size) * part.count();
}

void join_blocks(const PipelineContext& context, const SharedArguments& arguments,
                 const std::vector<Block>& blocks, size_t element_bytes, CopyFn copy, void* out) {
  for (int i = 0; i < context.local.size(); ++i) {
    const auto peer = static_cast<size_t>(turn(context, i));
    const size_t bytes = blocks[peer].count * element_bytes;
    copy(static_cast<std::byte*>(out) + blocks[peer].begin * element_bytes, arguments.in[peer],
         bytes, context.out_store);
    *context.intra_bytes += bytes;
  }
}

void reduce_block(const PipelineContext& context, const SharedArguments& arguments,
                  const Block& block, const Reduction& reduction, void* out) {
  if (block.count == 0) return;
  std::vector<const void*> inputs;
  for (const std::byte* in : arguments.in) {
    inputs.push_back(in + block.begin * reduction.element_bytes);
  }
  reduction.reduce({inputs.data(), static_cast<int>(inputs.size()), out, nullptr, block.count,
                    reduction.divisor, context.out_store, Store::kOrdinary});
  *context.intra_bytes += inputs.size() * block.count * reduction.element_bytes;
}

void tell_places(const PipelineContext& context, const Block* sent, const std::byte* in,
                 const SharedBuffer& buffer, size_t element_bytes) {
  std::byte* table = places(context, context.local.rank());
  for (int rank = 0; rank < context.local.size(); ++rank) {
    const uint64_t offset =
        static_cast<uint64_t>(in - buffer.own()) + sent[rank].begin * element_bytes;
    std::memcpy(table + static_cast<size_t>(rank) * sizeof offset, &offset, sizeof offset);
  }
}

void pick_blocks(const PipelineContext& context, const SharedBuffer& buffer,
                 const std::vector<Block>& received, size_t element_bytes, CopyFn copy, void* out) {
  const auto own = static_cast<size_t>(context.local.rank());
  for (int i = 0; i < context.local.size(); ++i) {
    const int peer = turn(context, i);
    const Block& block = received[static_cast<size_t>(peer)];
    const size_t bytes = block.count * element_bytes;
    uint64_t offset = 0;
    std::memcpy(&offset, places(context, peer) + own * sizeof offset, sizeof offset);
    copy(static_cast<std::byte*>(out) + block.begin * element_bytes, buffer.data(peer) + offset,
         bytes, context.out_store);
    *context.intra_bytes += bytes;
  }
}

}  // namespace hsgd
