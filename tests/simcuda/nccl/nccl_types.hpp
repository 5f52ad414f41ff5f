// The part of NCCL's C interface that the simulated NCCL exports, and what tests ask of it.
//
// Owns types, constants and prototypes, written from NCCL's public documentation: the names, values
// and layouts are those of libnccl.so.2. Holds no code.
#ifndef SIMCUDA_NCCL_NCCL_TYPES_HPP_
#define SIMCUDA_NCCL_NCCL_TYPES_HPP_

#include "../cuda_types.hpp"

extern "C" {

struct ncclComm;
typedef ncclComm* ncclComm_t;
typedef CUstream cudaStream_t;

constexpr size_t kIdBytes = 128;
struct ncclUniqueId {
  char internal[kIdBytes];
};

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8,
};

enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

SIMCUDA_API ncclResult_t ncclGetVersion(int* version);
SIMCUDA_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
SIMCUDA_API const char* ncclGetErrorString(ncclResult_t result);
SIMCUDA_API const char* ncclGetLastError(ncclComm_t comm);

SIMCUDA_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank);
SIMCUDA_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
SIMCUDA_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
SIMCUDA_API ncclResult_t ncclCommAbort(ncclComm_t comm);
SIMCUDA_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
SIMCUDA_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
SIMCUDA_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
SIMCUDA_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);

SIMCUDA_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                       cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                           cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count,
                                       ncclDataType_t type, ncclComm_t comm, cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count,
                                       ncclDataType_t type, int root, ncclComm_t comm,
                                       cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclReduce(const void* send, void* receive, size_t count,
                                    ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                                    cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, cudaStream_t stream);
SIMCUDA_API ncclResult_t ncclGroupStart();
SIMCUDA_API ncclResult_t ncclGroupEnd();

struct simnccl_counters {
  uint64_t bytes_sent;  // in the send buffers of this rank's calls, counted at the launch
  uint64_t calls;       // of operations, those of groups one by one
  uint64_t aborted;     // operations that an abort ended
  int live_comms;
};

SIMCUDA_API void simnccl_get_counters(simnccl_counters* counters);
// Those of live things stay.
SIMCUDA_API void simnccl_reset_counters();
// What ncclCommGetAsyncError gives from now on.
SIMCUDA_API ncclResult_t simnccl_set_async_error(ncclComm_t comm, int error);

}  // extern "C"

#endif  // SIMCUDA_NCCL_NCCL_TYPES_HPP_
