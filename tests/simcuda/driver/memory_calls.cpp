// The driver's functions for memory and its attributes.
#include <cstdio>

#include "entry.hpp"
#include "faults.hpp"
#include "memory.hpp"

using namespace simcuda;

namespace {

// What cuPointerGetAttribute says of a pointer.
struct Facts {
  Context* context;
  CUmemorytype type;
  CUdeviceptr first;
  size_t bytes;
  uint64_t id;  // 0: registered host memory
};

bool find_facts(CUdeviceptr pointer, Facts* facts) {
  if (const auto found = memory().allocation_at(pointer)) {
    *facts = Facts{&found->context, CU_MEMORYTYPE_DEVICE, found->first, found->bytes, found->id};
    return true;
  }
  HostRange host;
  if (!memory().registered_at(pointer, &host)) return false;
  *facts = Facts{host.context, CU_MEMORYTYPE_HOST, host.first, host.bytes, 0};
  return true;
}

template <typename Answer>
CUresult answer(void* data, Answer value) {
  *static_cast<Answer*>(data) = value;
  return CUDA_SUCCESS;
}

CUresult tell(void* data, CUpointer_attribute attribute, CUdeviceptr pointer, const Facts& facts) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return answer(data, facts.context->handle());
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return answer(data, static_cast<unsigned>(facts.type));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return answer(data, pointer);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (facts.type != CU_MEMORYTYPE_HOST) return CUDA_ERROR_INVALID_VALUE;
      return answer(data, reinterpret_cast<void*>(pointer));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return answer(data, static_cast<unsigned long long>(facts.id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return answer(data, 0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return answer(data, facts.context->device());
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return answer(data, facts.first);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return answer(data, facts.bytes);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const Entry entry = enter_driver(__func__);
  if (entry.refused()) return entry.result;
  Facts facts;
  if (data == nullptr || !find_facts(pointer, &facts)) return CUDA_ERROR_INVALID_VALUE;
  return tell(data, attribute, pointer, facts);
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().allocate(*entry.context, bytes, pointer);
}

// Waits for all work of the device, as the real one does.
CUresult cuMemFree_v2(CUdeviceptr pointer) {
  const Entry entry = enter(__func__);
  if (entry.refuses_release()) return entry.result;
  if (pointer == 0) return entry.result;
  if (const auto found = memory().allocation_at(pointer)) streams().synchronize(found->context);
  const CUresult result = memory().free(pointer);
  return entry.refused() ? entry.result : result;
}

CUresult cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  constexpr unsigned kFlags = 0xF;  // portable, device map, I/O memory, read only
  if (data == nullptr || bytes == 0 || (flags & ~kFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  return memory().register_host(*entry.context, reinterpret_cast<uintptr_t>(data), bytes);
}

CUresult cuMemHostUnregister(void* data) {
  const Entry entry = enter(__func__);
  if (entry.refuses_release()) return entry.result;
  const CUresult result = memory().unregister_host(reinterpret_cast<uintptr_t>(data));
  return entry.refused() ? entry.result : result;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pointer, void* data, unsigned flags) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  HostRange range;
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (pointer == nullptr || flags != 0 || !memory().registered_at(address, &range))
    return CUDA_ERROR_INVALID_VALUE;
  *pointer = address;
  return CUDA_SUCCESS;
}
