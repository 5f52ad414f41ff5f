// The way of a collective on device memory through host memory, step by step: down, what the ranks
// do there, up.
//
// Owns two streams, one for each direction, the slots of host memory, and the thread that
// exchanges. All that a step does on the device is queued when the step is passed: the streams wait
// for one another by events, and for the thread by a signal. Never blocks the caller, but where the
// driver's queues are full.
#ifndef HSGD_DEVICE_HOST_PATH_HPP_
#define HSGD_DEVICE_HOST_PATH_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device_call.hpp"
#include "device/device_resources.hpp"
#include "device/exchange_thread.hpp"

namespace hsgd {

// Slots that are used in turn: a step waits on the device until what was in its slot is up.
class SlotRing {
 public:
  // `memory`: registered, `count` slots of `slot_bytes`.
  SlotRing(const Device& device, std::byte* memory, size_t slot_bytes, unsigned count);
  size_t slot_bytes() const { return slot_bytes_; }
  struct Slot {
    std::byte* memory = nullptr;
    CudaEvent is_free = nullptr;  // recorded when it was used last
  };
  Slot next();

 private:
  std::byte* memory_;
  size_t slot_bytes_;
  std::vector<std::unique_ptr<OwnEvent>> free_;
  size_t turn_ = 0;
};

class HostPath {
 public:
  // Collective, blocking. `ranks`: first those of the device's collectives.
  // `guard`: see ExchangeThread; may be nullptr.
  HostPath(const Device& device, const std::vector<HostRanks>& ranks, size_t slot_bytes,
           unsigned slots, DeviceGuard* guard);
  ~HostPath();
  HostPath(const HostPath&) = delete;
  HostPath& operator=(const HostPath&) = delete;

  // Blocks until all that was passed is done, or fails; no step may be passed afterwards. False
  // where the device hangs in it, which may use what it was given for ever: that stays behind then.
  bool finish();
  CudaStream down() const { return down_; }
  CudaStream up() const { return up_; }
  ExchangeThread& thread() { return *thread_; }

  // All steps of a call, over the first communicator.
  void pass(const DeviceCall& call);
  // One step, over the communicator given. What it needs is queued on down() before, and what needs
  // it on up() afterwards.
  void pass_step(SlotRing& ring, const DeviceCall& call, const DeviceStep& step, hsgd_comm* comm);
  // For what the device does without host memory, on one and the same stream for all calls: begin()
  // has the ranks agree that all call this, when the stream has come to it or before. What is
  // passed from then on belongs to the call, and is guarded, until the stream has come to end().
  void begin(const DeviceCall& call, CudaStream stream);
  void end(CudaStream stream);
  // Slots that all ranks of a node map, in which the ranks combine without copies.
  SlotRing& shared_ring() { return *shared_; }

 private:
  void leave_behind();
  SlotRing& ring_for(const DeviceCall& call);
  HostTask new_task(const DeviceCall& call, HostTask::Kind kind);

  struct FreeBuffer {
    void operator()(hsgd_buffer* buffer) const { hsgd_buffer_free(buffer); }
  };

  const Device& device_;
  hsgd_comm* comm_;
  hsgd_topology topology_{};
  const unsigned slots_;
  std::unique_ptr<hsgd_buffer, FreeBuffer> buffer_;
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<SlotRing> shared_;
  std::unique_ptr<PinnedMemory> pinned_;  // for blocks, made when it is needed
  std::unique_ptr<SlotRing> own_;
  DeviceGuard* guard_;
  std::unique_ptr<Signal> has_copied_;
  std::unique_ptr<Signal> has_passed_;
  std::unique_ptr<Signal> may_copy_;
  OwnStream down_;
  OwnStream up_;
  uint32_t exchanges_;  // numbers of the signals has_copied and may_copy
  uint32_t marks_;      // and of has_passed
  bool is_guarded_ = false;
  std::unique_ptr<ExchangeThread> thread_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_HOST_PATH_HPP_
