// DeviceSteps: the steps of each kind of collective.
#include "device/device_call.hpp"

#include <algorithm>
#include <numeric>

namespace hsgd {
namespace {

constexpr size_t kLeastBlockBytes = 4096;
constexpr size_t kLine = 64;

size_t rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

uint64_t sum_of(const std::vector<uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

bool moves_blocks(hsgd_kind kind) {
  return kind == HSGD_REDUCE_SCATTER || kind == HSGD_ALLGATHER || kind == HSGD_ALLTOALL;
}

// Returns the number of blocks that a slot holds, input and output.
size_t blocks_in_slot(hsgd_kind kind, size_t ranks) {
  if (!moves_blocks(kind)) return 1;
  return kind == HSGD_ALLTOALL ? 2 * ranks : ranks + 1;
}

uint64_t longest_block(const DeviceCall& call) {
  if (!moves_blocks(call.kind)) return call.count;
  if (call.kind == HSGD_ALLTOALL) return call.longest;
  return call.counts.empty() ? 0 : *std::max_element(call.counts.begin(), call.counts.end());
}

}  // namespace

size_t DeviceSteps::least_slot_bytes(hsgd_kind kind, int ranks) {
  return 2 * kLine + blocks_in_slot(kind, static_cast<size_t>(ranks)) * kLeastBlockBytes;
}

DeviceSteps::DeviceSteps(const DeviceCall& call, int rank, size_t slot_bytes)
    : call_(call), rank_(static_cast<uint64_t>(rank)), item_(hsgd_dtype_bytes(call.dtype)) {
  const size_t blocks = blocks_in_slot(call.kind, call.counts.size());
  const size_t usable = slot_bytes - (blocks > 1 ? kLine : 0);  // the output begins at a cache line
  // Whole cache lines, so that every step except the last is aligned like the whole.
  part_ = usable / blocks / kLine * kLine / item_;
  // At least one step, so that ranks agree.
  steps_ = std::max<uint64_t>(1, (longest_block(call) + part_ - 1) / part_);
}

uint64_t DeviceSteps::length(uint64_t whole, uint64_t index) const {
  const uint64_t before = index * part_;
  return whole <= before ? 0 : std::min(part_, whole - before);
}

std::vector<uint64_t> DeviceSteps::lengths(const std::vector<uint64_t>& blocks,
                                           uint64_t index) const {
  std::vector<uint64_t> parts;
  parts.reserve(blocks.size());
  for (const uint64_t whole : blocks) parts.push_back(length(whole, index));
  return parts;
}

// Returns the parts of all blocks, one after the other in the slot.
std::vector<DevicePiece> DeviceSteps::of_blocks(DeviceAddress base, size_t offset,
                                                const std::vector<uint64_t>& blocks,
                                                uint64_t index) const {
  std::vector<DevicePiece> pieces;
  for (const uint64_t whole : blocks) {
    const size_t bytes = length(whole, index) * item_;
    const DeviceAddress from = base + index * part_ * item_;
    base += whole * item_;
    if (bytes == 0) continue;
    const bool joins = !pieces.empty() && pieces.back().device + pieces.back().bytes == from;
    if (joins) {
      pieces.back().bytes += bytes;
    } else {
      pieces.push_back({from, offset, bytes});
    }
    offset += bytes;
  }
  return pieces;
}

DeviceStep DeviceSteps::step(uint64_t index) const {
  return moves_blocks(call_.kind) ? block_step(index) : whole_step(index);
}

DeviceStep DeviceSteps::whole_step(uint64_t index) const {
  DeviceStep it;
  it.count = length(call_.count, index);
  it.result_bytes = it.count * item_;
  const size_t before = index * part_ * item_;
  const bool is_root = call_.kind == HSGD_BROADCAST && rank_ == static_cast<uint64_t>(call_.root);
  if (call_.kind == HSGD_ALLREDUCE || is_root) {
    it.down.push_back({call_.in + before, 0, it.result_bytes});
  }
  if (!is_root) it.up.push_back({call_.out + before, 0, it.result_bytes});
  return it;
}

DeviceStep DeviceSteps::block_step(uint64_t index) const {
  DeviceStep it;
  it.counts = lengths(call_.counts, index);
  const bool gathers = call_.kind == HSGD_ALLGATHER;
  const bool scatters = call_.kind == HSGD_REDUCE_SCATTER;
  const std::vector<uint64_t> own = {call_.counts[rank_]};
  const std::vector<uint64_t>& receives = gathers    ? call_.counts
                                          : scatters ? own
                                                     : call_.receive_counts;
  if (!gathers && !scatters) it.receive_counts = lengths(receives, index);
  const std::vector<uint64_t>& sends = gathers ? own : call_.counts;
  it.out = rounded(sum_of(lengths(sends, index)) * item_);
  it.down = of_blocks(call_.in, it.in, sends, index);
  it.up = of_blocks(call_.out, it.out, receives, index);
  it.result_bytes = sum_of(lengths(receives, index)) * item_;
  return it;
}

}  // namespace hsgd
