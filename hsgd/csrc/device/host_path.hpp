// HostPath: runs a collective on device memory through host memory, step by step: copy down,
// exchange, copy up.
//
// Owns two streams, one for each direction, the slots of host memory, and the thread that
// exchanges. All device work of a step is queued when the step is passed: the streams wait for one
// another by events, and for the thread by a signal. Blocks the caller only if the driver's queues
// are full.
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

// A ring of slots, used in turn: a step waits on the device until the previous result in its slot
// is copied up.
class SlotRing {
 public:
  // `memory`: registered, `count` slots of `slot_bytes`.
  SlotRing(const Device& device, std::byte* memory, size_t slot_bytes, unsigned count);
  size_t slot_bytes() const { return slot_bytes_; }
  struct Slot {
    std::byte* memory = nullptr;
    CudaEvent is_free = nullptr;  // recorded after its last use
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
  // Creates the path; all ranks must call it; blocks. `comms`, first that of the device's
  // collectives, and `guard`: see ExchangeThread.
  HostPath(const Device& device, const std::vector<hsgd_comm*>& comms, size_t slot_bytes,
           unsigned slots, DeviceGuard* guard);
  ~HostPath();
  HostPath(const HostPath&) = delete;
  HostPath& operator=(const HostPath&) = delete;

  // Blocks until all passed steps are done or have failed; no step may be passed afterwards.
  // Returns false if the device hangs in one: it may use its buffers forever, so they stay behind.
  bool finish();
  CudaStream down() const { return down_; }
  CudaStream up() const { return up_; }
  ExchangeThread& thread() { return *thread_; }

  // Passes all steps of a call, over the first communicator.
  void pass(const DeviceCall& call);
  // Passes one step, over the given communicator. Its input must be queued on down() before, and
  // uses of its result on up() afterwards.
  void pass_step(SlotRing& ring, const DeviceCall& call, const DeviceStep& step, hsgd_comm* comm);
  // begin() and end() enclose work that the device does without host memory, on the same stream for
  // all calls. begin() makes the ranks agree that all call this, when the stream reaches it or
  // earlier. Steps passed after it belong to the call, and are guarded until the stream reaches
  // end().
  void begin(const DeviceCall& call, CudaStream stream);
  void end(CudaStream stream);
  // Returns slots that all ranks of a node map, in which the ranks combine without copies.
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
  std::unique_ptr<PinnedMemory> pinned_;  // for blocks, created on first use
  std::unique_ptr<SlotRing> own_;
  DeviceGuard* guard_;
  std::unique_ptr<Signal> has_copied_;
  std::unique_ptr<Signal> has_passed_;
  std::unique_ptr<Signal> may_copy_;
  OwnStream down_;
  OwnStream up_;
  uint32_t exchanges_;  // numbers of the signals has_copied and may_copy
  uint32_t marks_;      // number of the signal has_passed
  bool is_guarded_ = false;
  std::unique_ptr<ExchangeThread> thread_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_HOST_PATH_HPP_
