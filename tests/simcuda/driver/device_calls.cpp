// The driver's functions for devices, contexts and the names of errors.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "entry.hpp"

using namespace simcuda;

namespace {

constexpr int kVersion = 13000;

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {CUDA_ERROR_NVLINK_UNCORRECTABLE, "CUDA_ERROR_NVLINK_UNCORRECTABLE",
     "uncorrectable NVLink error detected during the execution"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT",
     "the launch timed out and was terminated"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_HARDWARE_STACK_ERROR, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {CUDA_ERROR_ILLEGAL_INSTRUCTION, "CUDA_ERROR_ILLEGAL_INSTRUCTION",
     "an illegal instruction was encountered"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_INVALID_ADDRESS_SPACE, "CUDA_ERROR_INVALID_ADDRESS_SPACE",
     "operation not supported on global/shared address space"},
    {CUDA_ERROR_INVALID_PC, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult code) {
  const auto found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                  [code](const ErrorText& each) { return each.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

// A call about one device.
Entry enter_device(const char* function, CUdevice device, const void* answer) {
  Entry entry = enter_driver(function);
  if (entry.refused()) return entry;
  entry.context = devices().context_of(device);
  if (entry.context == nullptr) {
    entry.result = CUDA_ERROR_INVALID_DEVICE;
  } else if (answer == nullptr) {
    entry.result = CUDA_ERROR_INVALID_VALUE;
  }
  return entry;
}

}  // namespace

CUresult cuInit(unsigned flags) {
  const int code = injected(__func__);
  if (code != 0) return static_cast<CUresult>(code);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!devices().initialize()) return CUDA_ERROR_NO_DEVICE;
  return devices().initialized() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDriverGetVersion(int* version) {
  const int code = injected(__func__);
  if (code != 0) return static_cast<CUresult>(code);
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kVersion;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* found = find_error(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* found = find_error(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = devices().count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Entry entry = enter_device(__func__, ordinal, device);
  if (!entry.refused()) *device = ordinal;
  return entry.result;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  const Entry entry = enter_device(__func__, device, name);
  if (entry.refused()) return entry.result;
  if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, static_cast<size_t>(bytes), "Simulated GPU");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  const Entry entry = enter_device(__func__, device, uuid);
  if (!entry.refused()) std::memcpy(uuid->bytes, entry.context->uuid().data(), sizeof uuid->bytes);
  return entry.result;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const Entry entry = enter_device(__func__, device, value);
  if (!entry.refused()) *value = devices().attribute(attribute);
  return entry.result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Entry entry = enter_device(__func__, device, context);
  if (entry.refused()) return entry.result;
  entry.context->retain();
  *context = entry.context->handle();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  const Entry entry = enter_device(__func__, device, &device);
  if (entry.refused()) return entry.result;
  if (entry.context->release()) return CUDA_SUCCESS;
  record_violation("cuDevicePrimaryCtxRelease_v2: the context is not retained");
  return CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* current = current_context();
  *context = current == nullptr ? nullptr : current->handle();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  Context* found = devices().context_at(context);
  if (context != nullptr && found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  ContextStack& stack = context_stack();
  if (stack.count > 0) --stack.count;
  if (found != nullptr) stack.contexts[stack.count++] = found;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  Context* found = devices().context_at(context);
  ContextStack& stack = context_stack();
  if (found == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.count == std::size(stack.contexts)) return CUDA_ERROR_OUT_OF_MEMORY;
  stack.contexts[stack.count++] = found;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  Context* current = current_context();
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  --context_stack().count;
  if (context != nullptr) *context = current->handle();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = entry.context->device();
  return CUDA_SUCCESS;
}
