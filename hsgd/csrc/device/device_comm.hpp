// Collectives on the memory of a device, in the order of the program's streams.
//
// Owns the order of calls, the choice of a way, and the broken state after an error. A call comes
// after what its stream has queued, returns at once, and what a stream queues after it has waited
// for its work comes after the result. Nothing here waits for the device, but the destructor.
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
  unsigned slots = 4;      // steps that may be under way
};

// The end of one collective, on the device.
class HSGD_API DeviceWork {
 public:
  DeviceWork(std::shared_ptr<const Device> device, std::shared_ptr<EventPool> events);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  // Not blocking: what `stream` queues from now on comes after the collective.
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
  // Collective, blocking. `comm`: of these collectives alone, which nobody else uses until this is
  // gone. `between`: with NCCL and several nodes, of the ranks of all nodes with this rank's local
  // rank.
  DeviceComm(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd_comm> between,
             const DeviceOptions& options);
  ~DeviceComm();
  DeviceComm(const DeviceComm&) = delete;
  DeviceComm& operator=(const DeviceComm&) = delete;

  // Collective, not blocking; after what `streams` have queued, those of the arrays. Throws
  // HSGD_ERR_ARGUMENT while one is captured into a graph.
  using Streams = std::vector<CudaStream>;
  std::shared_ptr<DeviceWork> start(const DeviceCall& call, const Streams& streams);
  // Local. Blocks until all that was started is done, or fails; later calls throw. False where the
  // device hangs in it: then it may use the arrays for ever.
  bool finish();
  // Local, any thread, never blocks. Has what is under way fail, and all later calls.
  void abort();
  // Local. Throws what an earlier collective has failed with.
  void check() const;
  const hsgd_topology& topology() const { return topology_; }

 private:
  struct Parts;
  void queue(const DeviceCall& call, const Streams& streams, const DeviceWork& work);
  std::vector<int> with_local_rank(int local_rank) const;
  void copy_alone(const DeviceCall& call, const Streams& streams, const DeviceWork& work);
  void come_after(const Streams& streams, CudaStream later);

  Owner owner_;
  std::shared_ptr<hsgd_comm> comm_;
  std::shared_ptr<hsgd_comm> between_;
  hsgd_topology topology_{};
  std::shared_ptr<const Device> device_;
  std::shared_ptr<EventPool> events_;
  std::mutex mutex_;        // one call at a time
  std::mutex parts_mutex_;  // while parts_ goes, or is aborted
  bool is_finished_ = false;
  std::unique_ptr<OwnEvent> input_;  // when what a call needs is there
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_DEVICE_COMM_HPP_
