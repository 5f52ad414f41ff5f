// The door to NCCL: its functions, found at run time, and one communicator of a node's devices.
//
// Owns a communicator, and how it ends: destroyed when its operations are done, aborted when a rank
// is lost, which ends the kernels that wait for that rank. No header of NCCL is needed to build
// this. Operations are queued on a stream; nothing here waits for the device, but the end.
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

// As NCCL 2.10 and later declare them.
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
  // Local. Throws HSGD_ERR_SYSTEM where it cannot be loaded.
  explicit NcclLibrary(const std::string& name);
  NcclId new_id() const;
  // As NCCL counts from 2.9 on: 23004 is 2.30.4.
  int version() const;
  const NcclFunctions& functions() const { return functions_; }
  void check(NcclResult code, const char* what) const;

 private:
  std::string name_;
  NcclFunctions functions_{};
};

// The ranks of one node, with devices that NCCL takes. All but abort() by one thread at a time.
class NcclGroup {
 public:
  // Looks whether waiting for the others has become pointless, and throws then.
  using Look = std::function<void()>;
  // Collective over the group, blocking, with the device's context current. `look` is called while
  // others are waited for.
  NcclGroup(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<const Device> device,
            const NcclId& id, int rank, int size, const Look& look);
  // Everything queued must be done, or abort() have been called. Waits for NCCL some seconds at
  // most, which may wait for other ranks: then a thread stays behind.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The ranks' blocks, as `counts` has them, lie in rank order; all operations may be in place.
  void allreduce(DeviceAddress in, DeviceAddress out, uint64_t count, hsgd_dtype dtype, hsgd_op op,
                 CudaStream stream);
  void broadcast(DeviceAddress data, uint64_t count, hsgd_dtype dtype, int root, CudaStream stream);
  void reduce_scatter(DeviceAddress in, DeviceAddress out, const std::vector<uint64_t>& counts,
                      hsgd_dtype dtype, hsgd_op op, CudaStream stream);
  void allgather(DeviceAddress in, DeviceAddress out, const std::vector<uint64_t>& counts,
                 hsgd_dtype dtype, CudaStream stream);
  void alltoall(DeviceAddress in, const std::vector<uint64_t>& counts, DeviceAddress out,
                const std::vector<uint64_t>& receive_counts, hsgd_dtype dtype, CudaStream stream);

  // Any thread, never blocks: has what is queued end, in whatever state. What is queued afterwards
  // throws.
  void abort() noexcept;
  // Blocks for some seconds at most: whether nothing of an aborted group is under way any more;
  // true of one that was not.
  bool has_ended() const;

 private:
  // While it lives, abort() waits before it gives the communicator back.
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
