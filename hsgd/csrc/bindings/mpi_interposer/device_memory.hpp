// is_on_device(): asks the loaded CUDA driver if an address is device memory.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_DEVICE_MEMORY_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_DEVICE_MEMORY_HPP_

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hsgd::pmpi {
namespace device_memory {

using PointerAttribute = int (*)(void* data, int attribute, unsigned long long address);
// Values of CUDA's header.
constexpr int kSuccess = 0;
constexpr int kMemoryType = 2;
constexpr int kIsManaged = 8;
constexpr unsigned kDeviceMemory = 2;

inline int note_adds(dl_phdr_info* info, size_t, void* adds) {
  *static_cast<unsigned long long*>(adds) = info->dlpi_adds;
  return 1;  // the first library knows it
}

// Returns the driver's function, or nullptr if no driver is loaded. A search by name takes 17 us,
// so it runs only after the number of libraries that the process ever loaded has changed, which
// takes some 10 ns to check.
inline PointerAttribute pointer_attribute() {
  static std::atomic<PointerAttribute> known{nullptr};
  static std::atomic<unsigned long long> looked_at{0};
  if (const PointerAttribute found = known.load(std::memory_order_acquire)) return found;
  unsigned long long adds = 0;
  ::dl_iterate_phdr(&note_adds, &adds);
  if (adds == looked_at.load(std::memory_order_relaxed)) return nullptr;
  PointerAttribute found = nullptr;
  if (void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
    found = reinterpret_cast<PointerAttribute>(::dlsym(driver, "cuPointerGetAttribute"));
    known.store(found, std::memory_order_release);  // never closed: its code may be in use
  }
  looked_at.store(adds, std::memory_order_relaxed);
  return found;
}

}  // namespace device_memory

// Returns true for device memory; any thread may call it. Asks the driver if the process has loaded
// it. Managed memory does not count, because the CPU can read it.
inline bool is_on_device(const void* memory) {
  const device_memory::PointerAttribute ask = device_memory::pointer_attribute();
  if (ask == nullptr) return false;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  unsigned type = 0, is_managed = 0;  // an error for ordinary memory
  if (ask(&type, device_memory::kMemoryType, address) != device_memory::kSuccess) return false;
  if (type != device_memory::kDeviceMemory) return false;
  return ask(&is_managed, device_memory::kIsManaged, address) != device_memory::kSuccess ||
         (is_managed & 1U) == 0;
}

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_DEVICE_MEMORY_HPP_
