// Stands in for CUDA's driver: says that a piece of ordinary memory is a device's.
#include <stddef.h>
#include <stdint.h>

static uintptr_t first;
static size_t length;
static int is_managed;

void stand_in_claim(void* memory, size_t bytes, int managed) {
  first = (uintptr_t)memory;
  length = bytes;
  is_managed = managed;
}

int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) {
  if (address - first >= length) return 1;   // CUDA_ERROR_INVALID_VALUE: it knows no such memory
  if (attribute == 2) *(unsigned*)data = 2;  // of CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device
  if (attribute == 8) *(unsigned char*)data = is_managed;  // CU_POINTER_ATTRIBUTE_IS_MANAGED
  return attribute == 2 || attribute == 8 ? 0 : 1;
}
