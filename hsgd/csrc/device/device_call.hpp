// DeviceSteps: cuts a collective on device memory into steps that fit between two copies.
//
// Computes which bytes of the input go to which place of a slot in host memory, what the ranks do
// there, and which bytes return.
#ifndef HSGD_DEVICE_DEVICE_CALL_HPP_
#define HSGD_DEVICE_DEVICE_CALL_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "hsgd_core.h"

namespace hsgd {

// A call like hsgd_call, but on device memory. HSGD_ALLREDUCE, HSGD_BROADCAST, HSGD_REDUCE_SCATTER,
// HSGD_ALLGATHER and HSGD_ALLTOALL.
struct DeviceCall {
  hsgd_kind kind = HSGD_ALLREDUCE;
  DeviceAddress in = 0;
  DeviceAddress out = 0;
  uint64_t count = 0;                    // of allreduce and broadcast
  std::vector<uint64_t> counts;          // of the others: elements of each rank's block
  std::vector<uint64_t> receive_counts;  // of an alltoall
  uint64_t longest = 0;                  // of an alltoall: the longest block between any two ranks
  hsgd_dtype dtype = HSGD_FLOAT32;
  hsgd_op op = HSGD_SUM;
  int root = 0;
  std::shared_ptr<const std::string> name;  // or nullptr
  std::vector<int64_t> shape;
};

// A range of bytes that is contiguous on the device and in the slot.
struct DevicePiece {
  DeviceAddress device = 0;
  size_t offset = 0;  // in the slot
  size_t bytes = 0;
};

struct DeviceStep {
  std::vector<DevicePiece> down;
  std::vector<DevicePiece> up;
  size_t in = 0;   // offset in the slot of the ranks' input
  size_t out = 0;  // offset in the slot of their result
  size_t result_bytes = 0;
  uint64_t count = 0;
  std::vector<uint64_t> counts;
  std::vector<uint64_t> receive_counts;
};

class DeviceSteps {
 public:
  // `slot_bytes`: at least least_slot_bytes() of this call.
  DeviceSteps(const DeviceCall& call, int rank, size_t slot_bytes);
  // Returns the least bytes of a slot, the same on all ranks: blocks of one step have at least some
  // thousand bytes.
  static size_t least_slot_bytes(hsgd_kind kind, int ranks);
  // Returns the number of steps, the same on all ranks; at least one, so that ranks agree.
  uint64_t size() const { return steps_; }
  DeviceStep step(uint64_t index) const;

 private:
  uint64_t length(uint64_t whole, uint64_t index) const;  // length of a block's part
  std::vector<uint64_t> lengths(const std::vector<uint64_t>& blocks, uint64_t index) const;
  std::vector<DevicePiece> of_blocks(DeviceAddress base, size_t offset,
                                     const std::vector<uint64_t>& blocks, uint64_t index) const;
  DeviceStep whole_step(uint64_t index) const;
  DeviceStep block_step(uint64_t index) const;

  const DeviceCall& call_;
  const uint64_t rank_;
  const size_t item_;
  uint64_t part_ = 0;  // elements of a block in one step
  uint64_t steps_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_DEVICE_CALL_HPP_
