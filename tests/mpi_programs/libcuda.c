// Stands in for CUDA's driver: says that a piece of ordinary memory is a device's.
#include <stddef.h>
#include <stdint.h>

static uintptr_t first;
static size_t length;

void stand_in_claim(void* memory, size_t bytes) {
  first = (uintptr_t)memory;
  length = bytes;
}

int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) {
  if (attribute != 2) return 1;             // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  if (address - first >= length) return 1;  // CUDA_ERROR_INVALID_VALUE: it knows no such
  *(unsigned*)data = 2;                     // CU_MEMORYTYPE_DEVICE
  return 0;
}
