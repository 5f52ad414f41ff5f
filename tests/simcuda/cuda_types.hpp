// The part of the CUDA driver's C interface that the simulated driver exports.
//
// Owns types, constants and prototypes, written from the public documentation of the driver API:
// the names, values and layouts are those of libcuda.so.1. Holds no code.
#ifndef SIMCUDA_CUDA_TYPES_HPP_
#define SIMCUDA_CUDA_TYPES_HPP_

#include <cstddef>
#include <cstdint>

#define SIMCUDA_API __attribute__((visibility("default")))

extern "C" {

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef CUctx_st* CUcontext;
typedef CUstream_st* CUstream;
typedef CUevent_st* CUevent;
typedef void (*CUhostFn)(void* user_data);
struct CUuuid {
  char bytes[16];
};

enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_ECC_UNCORRECTABLE = 214,
  CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
  CUDA_ERROR_ASSERT = 710,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
  CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
  CUDA_ERROR_MISALIGNED_ADDRESS = 716,
  CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
  CUDA_ERROR_INVALID_PC = 718,
  CUDA_ERROR_LAUNCH_FAILED = 719,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_UNKNOWN = 999,
};

enum CUmemorytype : unsigned { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };

enum CUpointer_attribute : int {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
  CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
};

enum CUstreamCaptureStatus : int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
  CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
};

enum CUstreamWaitValue_flags : unsigned {
  CU_STREAM_WAIT_VALUE_GEQ = 0,
  CU_STREAM_WAIT_VALUE_EQ = 1,
  CU_STREAM_WAIT_VALUE_AND = 2,
  CU_STREAM_WAIT_VALUE_NOR = 3,
  CU_STREAM_WAIT_VALUE_FLUSH = 1u << 30,
};

typedef int CUdevice_attribute;
typedef uint32_t cuuint32_t;

SIMCUDA_API CUresult cuInit(unsigned flags);
SIMCUDA_API CUresult cuDriverGetVersion(int* version);
SIMCUDA_API CUresult cuGetErrorName(CUresult error, const char** name);
SIMCUDA_API CUresult cuGetErrorString(CUresult error, const char** text);

SIMCUDA_API CUresult cuDeviceGetCount(int* count);
SIMCUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal);
SIMCUDA_API CUresult cuDeviceGetName(char* name, int bytes, CUdevice device);
SIMCUDA_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device);
SIMCUDA_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                          CUdevice device);
SIMCUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
SIMCUDA_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);

SIMCUDA_API CUresult cuCtxGetCurrent(CUcontext* context);
SIMCUDA_API CUresult cuCtxSetCurrent(CUcontext context);
SIMCUDA_API CUresult cuCtxPushCurrent_v2(CUcontext context);
SIMCUDA_API CUresult cuCtxPopCurrent_v2(CUcontext* context);
SIMCUDA_API CUresult cuCtxGetDevice(CUdevice* device);
SIMCUDA_API CUresult cuCtxSynchronize();

SIMCUDA_API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                           CUdeviceptr pointer);
SIMCUDA_API CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes);
SIMCUDA_API CUresult cuMemFree_v2(CUdeviceptr pointer);
SIMCUDA_API CUresult cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags);
SIMCUDA_API CUresult cuMemHostUnregister(void* data);
SIMCUDA_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pointer, void* data, unsigned flags);

SIMCUDA_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes,
                                          CUstream stream);
SIMCUDA_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes,
                                          CUstream stream);
SIMCUDA_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                          CUstream stream);
SIMCUDA_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes);
SIMCUDA_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes);
SIMCUDA_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                     CUstream stream);

SIMCUDA_API CUresult cuStreamCreate(CUstream* stream, unsigned flags);
SIMCUDA_API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority);
SIMCUDA_API CUresult cuStreamDestroy_v2(CUstream stream);
SIMCUDA_API CUresult cuStreamSynchronize(CUstream stream);
SIMCUDA_API CUresult cuStreamQuery(CUstream stream);
SIMCUDA_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
SIMCUDA_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status);
SIMCUDA_API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                             unsigned flags);
SIMCUDA_API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                            unsigned flags);
SIMCUDA_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data);

SIMCUDA_API CUresult cuEventCreate(CUevent* event, unsigned flags);
SIMCUDA_API CUresult cuEventRecord(CUevent event, CUstream stream);
SIMCUDA_API CUresult cuEventQuery(CUevent event);
SIMCUDA_API CUresult cuEventSynchronize(CUevent event);
SIMCUDA_API CUresult cuEventDestroy_v2(CUevent event);

}  // extern "C"

#endif  // SIMCUDA_CUDA_TYPES_HPP_
