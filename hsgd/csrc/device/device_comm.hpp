// DeviceComm: runs collectives on device memory, in the order of the program's streams.
//
// Owns the order of calls, the choice of NCCL or host memory, and the broken state after an error.
// A call runs after the earlier work of its streams and returns at once. After a stream has waited
// for its work, everything queued on that stream runs after the result. Only finish() and the
// destructor wait for the device.
#ifndef HSGD_DEVICE_DEVICE_COMM_HPP_
#define HSGD_DEVICE_DEVICE_COMM_HPP_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/os/fork_guard.hpp"
#include "device/device_call.hpp"
#include "device/host_path.hpp"
#include "device/nccl.hpp"

namespace hsgd {

struct DeviceOptions {
  std::string cuda_library;
  std::string nccl_library;  // "": devices exchange through host memory
  NcclId nccl_id{};          // of this node
  int ordinal = 0;
  size_t chunk_bytes = 0;  // of one step
  unsigned slots = 4;      // steps that may be in progress
};

// The end of one collective on the device.
class HSGD_API DeviceWork {
 public:
  DeviceWork(std::shared_ptr<const Device> device, std::shared_ptr<EventPool> events);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  // Makes everything that `stream` queues from now on run after the collective. Does not block.
  void order(CudaStream stream) const;
  bool done() const;
  CudaEvent event() const { return *event_; }

 private:
  std::shared_ptr<const Device> device_;
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<OwnEvent> event_;
};

class HSGD_API DeviceComm {
 public:
  // Creates the communicator; all ranks must call it; blocks. `comm`: used for these collectives
  // alone, by no other code until this object is destroyed. `between`: with NCCL and several nodes,
  // a communicator of the ranks with this rank's local rank on all nodes, whose errors call them as
  // those of `comm` do.
  DeviceComm(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd_comm> between,
             const DeviceOptions& options);
  ~DeviceComm();
  DeviceComm(const DeviceComm&) = delete;
  DeviceComm& operator=(const DeviceComm&) = delete;

  // Starts a collective; all ranks must call it; does not block. It runs after the work queued on
  // `streams`, the streams of the arrays. Throws HSGD_ERR_ARGUMENT while one of them is captured
  // into a graph.
  using Streams = std::vector<CudaStream>;
  std::shared_ptr<DeviceWork> start(const DeviceCall& call, const Streams& streams);
  // Blocks until all started collectives are done or have failed; later calls throw. Local. Returns
  // false if the device hangs in one: then it may use the arrays forever.
  bool finish();
  // Makes all collectives in progress and all later calls fail. Local; may be called from any
  // thread; never blocks.
  void abort();
  // Throws the error of an earlier failed collective. Local.
  void check() const;
  const hsgd_topology& topology() const { return topology_; }

 private:
  struct Parts;
  void queue(const DeviceCall& call, const Streams& streams, const DeviceWork& work);
  void copy_alone(const DeviceCall& call, const Streams& streams, const DeviceWork& work);
  void come_after(const Streams& streams, CudaStream later);

  Owner owner_;
  std::shared_ptr<hsgd_comm> comm_;
  std::shared_ptr<hsgd_comm> between_;
  hsgd_topology topology_{};
  std::shared_ptr<const Device> device_;
  std::shared_ptr<EventPool> events_;
  std::mutex mutex_;        // one call at a time
  std::mutex parts_mutex_;  // held while parts_ is destroyed or aborted
  bool is_finished_ = false;
  std::unique_ptr<OwnEvent> input_;  // recorded when a call's input is ready
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_DEVICE_COMM_HPP_
