// Device memory and registered host memory of the simulated GPUs.
//
// Owns the addresses. Those of device memory cannot be read or written by the host, those of freed
// memory are never given to another allocation. Never waits for streams.
#ifndef SIMCUDA_DRIVER_MEMORY_HPP_
#define SIMCUDA_DRIVER_MEMORY_HPP_

#include <map>
#include <memory>
#include <shared_mutex>
#include <string>

#include "internal.hpp"

namespace simcuda {

// Pages that the host sees at `alias_` only; given back when nothing holds it any more.
class Allocation {
 public:
  Allocation(Context& context, uint64_t id, uintptr_t first, size_t bytes, std::byte* alias,
             size_t mapped_bytes)
      : context(context),
        id(id),
        first(first),
        bytes(bytes),
        alias_(alias),
        mapped_bytes_(mapped_bytes) {}
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation();
  std::byte* at(uintptr_t address) const { return alias_ + (address - first); }

  Context& context;
  const uint64_t id;
  const uintptr_t first;  // as handed out
  const size_t bytes;     // as asked for

 private:
  std::byte* const alias_;
  const size_t mapped_bytes_;
};

struct HostRange {
  uintptr_t first;
  size_t bytes;
  Context* context;
};

class Memory {
 public:
  CUresult allocate(Context& context, size_t bytes, CUdeviceptr* pointer);
  CUresult free(CUdeviceptr pointer);
  CUresult register_host(Context& context, uintptr_t first, size_t bytes);
  CUresult unregister_host(uintptr_t first);

  // Whether it lies among the addresses of device memory, live or not.
  bool is_device(uintptr_t address) const;
  std::shared_ptr<Allocation> allocation_at(uintptr_t address) const;
  bool registered_at(uintptr_t address, HostRange* range) const;
  // All of [address, address + bytes), inside of work. `of`: must be memory of that context;
  // nullptr: of any.
  CUresult view(const std::string& what, const Context* of, uintptr_t address, size_t bytes,
                View* view) const;

 private:
  bool reserve();
  const char* why_bad(const Context* of, uintptr_t address, size_t bytes, View* view) const;

  mutable std::shared_mutex mutex_;
  uintptr_t next_ = 0;  // address of the next allocation
  uint64_t next_id_ = 1;
  uintptr_t begin_ = 0;  // of all addresses of device memory
  uintptr_t end_ = 0;
  std::map<uintptr_t, std::shared_ptr<Allocation>> live_;
  std::map<uintptr_t, size_t> freed_;
  std::map<uintptr_t, HostRange> host_;
};

// Of this process; see faults().
Memory& memory();

}  // namespace simcuda

#endif  // SIMCUDA_DRIVER_MEMORY_HPP_
