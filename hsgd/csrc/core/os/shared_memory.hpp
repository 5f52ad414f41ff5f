// Shared memory segments: anonymous files (memfd) mapped by every rank of a node.
//
// Fd owns a file descriptor, Segment owns one mapping. A segment has no name in any file system, so
// nothing is left after its last holder dies. Pages are allocated before they are used: full memory
// is HSGD_ERR_MEMORY, not SIGBUS later.
#ifndef HSGD_CORE_OS_SHARED_MEMORY_HPP_
#define HSGD_CORE_OS_SHARED_MEMORY_HPP_

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "core/os/page.hpp"

namespace hsgd {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLargeSegment = 4 * kHugePage;  // from here on with huge pages, if available

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  // Returns a second descriptor of the same file.
  static Fd duplicate(int fd);
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Creates a segment and allocates all its pages.
  static Segment create(size_t bytes, const char* remedy = "ask for less");
  // Maps a file that another process made; refuses a file smaller than `bytes`.
  static Segment attach(Fd fd, size_t bytes);
  // Maps a file whose pages are not all allocated yet; call populate() once they are.
  static Segment attach_empty(Fd fd, size_t bytes);
  // Enters pages of the file in this process's page table, so that later accesses do not fault.
  void populate(size_t begin, size_t bytes);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }  // only until forget_file()
  // Closes the descriptor: the mapping does not need it, and many ranks need many descriptors.
  void forget_file() { fd_ = Fd(); }

 private:
  Segment(Fd fd, size_t bytes, bool populated);
  Fd fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Throws HSGD_ERR_MEMORY if `count` times `bytes` is more than machine and cgroup have left.
// `remedy`: advice for the user. `available`: bytes left at an earlier time to use instead of those
// left now.
void check_memory(size_t bytes, size_t count, const char* remedy,
                  std::optional<size_t> available = std::nullopt);
Fd new_memory_file(size_t bytes);  // without pages
// Allocates the pages of a range of such a file, near the core on which this thread runs. Parts
// that do not fill a huge page, or do not begin at a multiple of one, get small pages, unless Linux
// uses huge pages for all shared memory (shmem_enabled "always").
void allocate_pages(int fd, size_t begin, size_t bytes);

void* map_shared(int fd, size_t bytes, bool populated);
void unmap_shared(void* address, size_t bytes);
// Enters pages of such a mapping: at its address, and at the same offset of the file.
bool populate_shared(void* mapping, int fd, size_t begin, size_t bytes);

// Returns the bytes that may still be allocated: the machine's available memory or what the cgroups
// of this process leave, whichever is less. `root`: see Cgroups.
size_t available_memory_bytes(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_CORE_OS_SHARED_MEMORY_HPP_
