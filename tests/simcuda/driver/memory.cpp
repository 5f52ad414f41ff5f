// Mapping device memory twice, and finding what an address belongs to.
#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "faults.hpp"

namespace simcuda {
namespace {

constexpr size_t kAddresses = size_t{1} << 39;  // reserved for device memory, at the first use
constexpr int kJunk = 0xCB;                     // what new memory holds
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

size_t whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

// The entry of a map by first address that begins at or before an address.
template <typename Map>
auto at_or_before(const Map& map, uintptr_t address) {
  const auto after = map.upper_bound(address);
  return after == map.begin() ? map.end() : std::prev(after);
}

// Maps new pages, without access at `first` and with it at the address that is returned.
std::byte* map_twice(uintptr_t first, size_t bytes) {
  const int fd = ::memfd_create("simcuda", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  void* alias = MAP_FAILED;
  if (::ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    alias = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (alias != MAP_FAILED) {
    ::mmap(reinterpret_cast<void*>(first), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
  }
  ::close(fd);
  return alias == MAP_FAILED ? nullptr : static_cast<std::byte*>(alias);
}

}  // namespace

Allocation::~Allocation() { ::munmap(alias_, mapped_bytes_); }

bool Memory::reserve() {
  if (begin_ != 0) return true;
  void* range = ::mmap(nullptr, kAddresses, PROT_NONE, kReserved, -1, 0);
  if (range == MAP_FAILED) return false;
  begin_ = next_ = reinterpret_cast<uintptr_t>(range);
  end_ = begin_ + kAddresses;
  return true;
}

CUresult Memory::allocate(Context& context, size_t bytes, CUdeviceptr* pointer) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  const size_t mapped = whole_pages(bytes);
  const size_t guard = whole_pages(1);
  if (!reserve() || mapped < bytes || mapped + guard > end_ - next_)
    return CUDA_ERROR_OUT_OF_MEMORY;
  std::byte* alias = map_twice(next_, mapped);
  if (alias == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(alias, kJunk, bytes);
  live_[next_] = std::make_shared<Allocation>(context, next_id_++, next_, bytes, alias, mapped);
  *pointer = next_;
  next_ += mapped + guard;
  count(&simcuda_counters::device_allocations_live);
  return CUDA_SUCCESS;
}

CUresult Memory::free(CUdeviceptr pointer) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  const auto found = live_.find(pointer);
  if (found == live_.end()) {
    const char* why = freed_.count(pointer) > 0 ? "was freed before" : "is not an allocation";
    char text[96];
    std::snprintf(text, sizeof text, "cuMemFree_v2: 0x%llx %s", pointer, why);
    record_violation(text);
    return CUDA_ERROR_INVALID_VALUE;
  }
  const size_t bytes = found->second->bytes;
  ::mmap(reinterpret_cast<void*>(pointer), whole_pages(bytes), PROT_NONE, kReserved | MAP_FIXED, -1,
         0);
  freed_[pointer] = bytes;
  live_.erase(found);
  count(&simcuda_counters::device_allocations_live, -1);
  return CUDA_SUCCESS;
}

CUresult Memory::register_host(Context& context, uintptr_t first, size_t bytes) {
  const uintptr_t page = first / whole_pages(1) * whole_pages(1);
  // Changes nothing; fails where a page is not mapped.
  if (::msync(reinterpret_cast<void*>(page), first - page + bytes, MS_ASYNC) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  if (first < end_ && first + bytes > begin_) return CUDA_ERROR_INVALID_VALUE;
  const auto before = at_or_before(host_, first + bytes - 1);
  if (before != host_.end() && before->second.first + before->second.bytes > first)
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  host_[first] = HostRange{first, bytes, &context};
  count(&simcuda_counters::registered_bytes_live, static_cast<int64_t>(bytes));
  return CUDA_SUCCESS;
}

CUresult Memory::unregister_host(uintptr_t first) {
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  const auto found = host_.find(first);
  if (found == host_.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  count(&simcuda_counters::registered_bytes_live, -static_cast<int64_t>(found->second.bytes));
  host_.erase(found);
  return CUDA_SUCCESS;
}

bool Memory::is_device(uintptr_t address) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return address >= begin_ && address < end_;
}

std::shared_ptr<Allocation> Memory::allocation_at(uintptr_t address) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = at_or_before(live_, address);
  if (found == live_.end() || address >= found->first + found->second->bytes) return nullptr;
  return found->second;
}

bool Memory::registered_at(uintptr_t address, HostRange* range) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = at_or_before(host_, address);
  if (found == host_.end() || address >= found->first + found->second.bytes) return false;
  *range = found->second;
  return true;
}

CUresult Memory::view(const std::string& what, const Context* of, uintptr_t address, size_t bytes,
                      View* view) const {
  const char* why = why_bad(of, address, bytes, view);
  if (why == nullptr) return CUDA_SUCCESS;
  char text[160];
  std::snprintf(text, sizeof text, ": %zu bytes at 0x%zx %s", bytes, static_cast<size_t>(address),
                why);
  record_violation(what + text);
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

// What is wrong with a range; nullptr: nothing, and the view is set.
const char* Memory::why_bad(const Context* of, uintptr_t address, size_t bytes, View* view) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  if (address >= begin_ && address < end_) {
    const auto found = at_or_before(live_, address);
    if (found != live_.end() && address < found->first + found->second->bytes) {
      const Allocation& allocation = *found->second;
      if (bytes > allocation.first + allocation.bytes - address)
        return "cross the end of their allocation";
      if (of != nullptr && of != &allocation.context) return "are memory of another device";
      *view = View{allocation.at(address), found->second};
      return nullptr;
    }
    const auto gone = at_or_before(freed_, address);
    const bool freed = gone != freed_.end() && address < gone->first + gone->second;
    return freed ? "were freed" : "were never allocated";
  }
  const auto host = at_or_before(host_, address);
  if (host == host_.end() || address >= host->first + host->second.bytes)
    return "are neither device memory nor registered";
  if (bytes > host->first + host->second.bytes - address) return "cross the end of a registration";
  *view = View{reinterpret_cast<std::byte*>(address), nullptr};
  return nullptr;
}

Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

CUresult translate(const char* function, Context& context, const void* address, size_t bytes,
                   View* view) {
  return memory().view(function, &context, reinterpret_cast<uintptr_t>(address), bytes, view);
}

}  // namespace simcuda
