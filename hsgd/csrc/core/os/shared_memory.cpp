// Makes memfd segments, and checks the memory before they are allocated.
#include "core/os/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/base/error.hpp"
#include "core/os/cgroup.hpp"
#include "core/os/mapping_failure.hpp"

namespace hsgd {
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE: Linux 6.1, newer than some headers
constexpr size_t kCollapseBytes = 2 * kHugePage;  // at a time: the clock is read in between
constexpr auto kPageLimit = std::chrono::milliseconds(8);  // for a huge page, on average

// Reserves addresses, so that no other thread maps something there meanwhile. Large ranges begin at
// a multiple of a huge page; otherwise no huge page can be mapped there.
void* reserve(size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const size_t slack = bytes < kLargeSegment ? 0 : kHugePage;
  const size_t page = page_bytes();
  const size_t used = (bytes + page - 1) / page * page;
  void* range = ::mmap(nullptr, used + slack, PROT_NONE, kFlags, -1, 0);
  if (range == MAP_FAILED || slack == 0) return range;
  auto* first = static_cast<std::byte*>(range);
  const size_t before = -reinterpret_cast<uintptr_t>(first) % kHugePage;
  if (before > 0) ::munmap(first, before);
  if (before < slack) ::munmap(first + before + used, slack - before);
  return first + before;
}

// `more`: further flags of mmap().
void* map_file(int fd, size_t begin, size_t bytes, int more) {
  void* range = reserve(bytes);
  if (range == MAP_FAILED) return range;
  const int flags = MAP_SHARED | MAP_FIXED | more;
  void* address =
      ::mmap(range, bytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(begin));
  if (address == MAP_FAILED) {
    const int error = errno;
    ::munmap(range, bytes);
    errno = error;
  }
  return address;
}

// Gives a range without pages huge pages, from `first` on, if the kernel has them soon: 100 MB then
// need 50 page-table entries instead of 25,000. If it fails, it reports nothing; posix_fallocate()
// adds the rest.
//
// MADV_COLLAPSE works with any value of /sys/kernel/mm/transparent_hugepage/shmem_enabled except
// "deny" (commit 7c6c6cc4d3a2 of Linux). It needs one page in each range and fills the rest with
// zeros, so only that page is copied. If memory is fragmented, the kernel first moves other pages
// away. The time limit grows with the segment, so that many small segments wait no longer than a
// large one.
void add_huge_pages(int fd, size_t first, size_t bytes) {
  const size_t whole = bytes / kHugePage * kHugePage;
  void* range = map_file(fd, first, whole, 0);
  if (range == MAP_FAILED) return;
  auto* data = static_cast<std::byte*>(range);
  const auto end = std::chrono::steady_clock::now() + whole / kHugePage * kPageLimit;
  for (size_t at = 0; at < whole && std::chrono::steady_clock::now() < end;) {
    const size_t step = std::min(kCollapseBytes, whole - at);
    bool begun = true;
    for (size_t page = at; page < at + step && begun; page += kHugePage) {
      begun = ::pwrite(fd, "", 1, static_cast<off_t>(first + page)) == 1;
    }
    if (!begun || ::madvise(data + at, step, kCollapse) != 0) break;
    at += step;
  }
  ::munmap(data, whole);
}

}  // namespace

// Weak: tests that run ranks as threads replace it with one shared mapping, because the thread
// sanitizer sees no race between two mappings.
__attribute__((weak)) void* map_shared(int fd, size_t bytes, bool populated) {
  return map_file(fd, 0, bytes, populated ? MAP_POPULATE : 0);
}
__attribute__((weak)) void unmap_shared(void* address, size_t bytes) { ::munmap(address, bytes); }
// Maps the same pages at the same addresses again: MADV_POPULATE_WRITE needs Linux 5.14.
__attribute__((weak)) bool populate_shared(void* mapping, int fd, size_t begin, size_t bytes) {
  constexpr int kFlags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
  return ::mmap(static_cast<std::byte*>(mapping) + begin, bytes, PROT_READ | PROT_WRITE, kFlags, fd,
                static_cast<off_t>(begin)) != MAP_FAILED;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Fd Fd::duplicate(int fd) {
  Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) fail_system("dup");
  return copy;
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) unmap_shared(data_, bytes_);
}

Segment::Segment(Fd fd, size_t bytes, bool populated) : fd_(std::move(fd)), bytes_(bytes) {
  void* address = map_shared(fd_.get(), bytes, populated);
  if (address == MAP_FAILED) fail_mapping("shared memory", bytes, available_memory_bytes);
  data_ = static_cast<std::byte*>(address);
}

void check_memory(size_t bytes, size_t count, const char* remedy, std::optional<size_t> before) {
  const size_t available = before ? *before : available_memory_bytes();
  if (bytes <= available / count) return;
  throw_error(HSGD_ERR_MEMORY, -1,
              "shared memory: %zu x %zu bytes are needed and %zu are left within the limits of "
              "this machine or cgroup; %s, or raise the memory limit",
              count, bytes, available, remedy);
}

Fd new_memory_file(size_t bytes) {
  Fd fd(::memfd_create("hsgd", MFD_CLOEXEC));
  if (!fd.valid()) fail_system("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail_system("sizing of shared memory");
  return fd;
}

void allocate_pages(int fd, size_t begin, size_t bytes) {
  if (bytes >= kLargeSegment && begin % kHugePage == 0) add_huge_pages(fd, begin, bytes);
  int status = 0;
  do {
    status = ::posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(bytes));
  } while (status == EINTR);
  if (status != 0) {
    throw_error(HSGD_ERR_MEMORY, -1, "shared memory: allocating %zu bytes failed: %s", bytes,
                std::strerror(status));
  }
}

Segment Segment::create(size_t bytes, const char* remedy) {
  check_memory(bytes, 1, remedy);
  Fd fd = new_memory_file(bytes);
  allocate_pages(fd.get(), 0, bytes);
  return Segment(std::move(fd), bytes, true);
}

namespace {

void check_size(const Fd& fd, size_t bytes) {
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) fail_system("fstat of a peer's shared memory");
  if (static_cast<size_t>(status.st_size) < bytes) {
    throw_error(
        HSGD_ERR_SYSTEM, -1,
        "shared memory: a peer's segment has %zu bytes, %zu expected; ranks must use the same "
        "hsgd and the same HSGD_* settings",
        static_cast<size_t>(status.st_size), bytes);
  }
}

}  // namespace

Segment Segment::attach(Fd fd, size_t bytes) {
  check_size(fd, bytes);
  return Segment(std::move(fd), bytes, true);
}

Segment Segment::attach_empty(Fd fd, size_t bytes) {
  check_size(fd, bytes);
  return Segment(std::move(fd), bytes, false);
}

void Segment::populate(size_t begin, size_t bytes) {
  if (!populate_shared(data_, fd_.get(), begin, bytes))
    fail_mapping("shared memory", bytes, available_memory_bytes);
}

namespace {

uint64_t machine_available_bytes(const std::string& root) {
  std::FILE* file = std::fopen((root + "/proc/meminfo").c_str(), "re");
  if (file == nullptr) return UINT64_MAX;
  char line[256];
  unsigned long long kib = 0;
  uint64_t bytes = UINT64_MAX;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) bytes = kib * 1024;
  }
  std::fclose(file);
  return bytes;
}

}  // namespace

size_t available_memory_bytes(const std::string& root) {
  return static_cast<size_t>(
      std::min(machine_available_bytes(root), Cgroups(root).memory_left_bytes()));
}

}  // namespace hsgd
