// NcclGroup: calls NCCL, found at run time, with one communicator of a node's devices.
//
// Owns the communicator and ends it: destroys it when its operations are done, or aborts it when a
// rank is lost, which ends the kernels that wait for that rank. Needs no header of NCCL to build.
// Operations are queued on a stream; only the end waits for the device.
#ifndef HSGD_DEVICE_NCCL_HPP_
#define HSGD_DEVICE_NCCL_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "hsgd_core.h"

namespace hsgd {

using NcclResult = int;
using NcclComm = void*;

struct NcclId {
  char bytes[128];
};

// The functions as NCCL 2.10 and later declare them.
struct NcclFunctions {
  NcclResult (*ncclGetVersion)(int* version);
  NcclResult (*ncclGetUniqueId)(NcclId* id);
  NcclResult (*ncclCommInitRank)(NcclComm* comm, int size, NcclId id, int rank);
  NcclResult (*ncclCommDestroy)(NcclComm comm);
  NcclResult (*ncclCommAbort)(NcclComm comm);
  NcclResult (*ncclAllReduce)(const void* in, void* out, size_t count, int dtype, int op,
                              NcclComm comm, CudaStream stream);
  NcclResult (*ncclReduceScatter)(const void* in, void* out, size_t count, int dtype, int op,
                                  NcclComm comm, CudaStream stream);
  NcclResult (*ncclAllGather)(const void* in, void* out, size_t count, int dtype, NcclComm comm,
                              CudaStream stream);
  NcclResult (*ncclBroadcast)(const void* in, void* out, size_t count, int dtype, int root,
                              NcclComm comm, CudaStream stream);
  NcclResult (*ncclReduce)(const void* in, void* out, size_t count, int dtype, int op, int root,
                           NcclComm comm, CudaStream stream);
  NcclResult (*ncclSend)(const void* in, size_t count, int dtype, int peer, NcclComm comm,
                         CudaStream stream);
  NcclResult (*ncclRecv)(void* out, size_t count, int dtype, int peer, NcclComm comm,
                         CudaStream stream);
  NcclResult (*ncclGroupStart)();
  NcclResult (*ncclGroupEnd)();
  const char* (*ncclGetErrorString)(NcclResult code);
};

class HSGD_API NcclLibrary {
 public:
  // Loads the library. Local. Throws HSGD_ERR_SYSTEM if it cannot be loaded.
  explicit NcclLibrary(const std::string& name);
  NcclId new_id() const;
  // Returns the version as NCCL counts from 2.9 on: 23004 is 2.30.4.
  int version() const;
  const NcclFunctions& functions() const { return functions_; }
  void check(NcclResult code, const char* what) const;

 private:
  std::string name_;
  NcclFunctions functions_{};
};

// The ranks of one node, with devices that NCCL accepts. Only abort() may be called by several
// threads at a time.
class NcclGroup {
 public:
  // Checks during a wait; throws if the wait has become pointless.
  using Look = std::function<void()>;
  // Creates the group; all its ranks must call it, with the device's context current; blocks.
  // `look` is called while this rank waits for others.
  NcclGroup(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<const Device> device,
            const NcclId& id, int rank, int size, const Look& look);
  // Ends the group. All queued work must be done, or abort() must have been called. Waits some
  // seconds at most for NCCL, which may wait for other ranks: then a thread stays behind.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The ranks' blocks, given by `counts`, are in rank order; all operations may be in place.
  void allreduce(DeviceAddress in, DeviceAddress out, uint64_t count, hsgd_dtype dtype, hsgd_op op,
                 CudaStream stream);
  void broadcast(DeviceAddress data, uint64_t count, hsgd_dtype dtype, int root, CudaStream stream);
  void reduce_scatter(DeviceAddress in, DeviceAddress out, const std::vector<uint64_t>& counts,
                      hsgd_dtype dtype, hsgd_op op, CudaStream stream);
  void allgather(DeviceAddress in, DeviceAddress out, const std::vector<uint64_t>& counts,
                 hsgd_dtype dtype, CudaStream stream);
  void alltoall(DeviceAddress in, const std::vector<uint64_t>& counts, DeviceAddress out,
                const std::vector<uint64_t>& receive_counts, hsgd_dtype dtype, CudaStream stream);

  // Ends all queued work, in any state; later calls throw. May be called from any thread; never
  // blocks.
  void abort() noexcept;
  // Blocks for some seconds at most. Returns true if no work of an aborted group is in progress any
  // more, or if it was not aborted.
  bool has_ended() const;

 private:
  // While it exists, abort() waits before it releases the communicator.
  class Inside {
   public:
    explicit Inside(NcclGroup& group);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::atomic<int>& inside_;
  };
  template <class Body>
  void as_group(Body&& body);
  void end(bool by_abort);

  std::shared_ptr<const NcclLibrary> library_;
  const NcclFunctions& nccl_;
  std::shared_ptr<const Device> device_;
  const int rank_;
  const int size_;
  NcclComm comm_ = nullptr;
  std::mutex mutex_;
  std::shared_ptr<std::atomic<int>> inside_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<bool> is_aborted_{false};
  std::future<void> ended_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_NCCL_HPP_
