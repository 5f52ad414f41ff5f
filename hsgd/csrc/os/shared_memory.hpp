// Shared memory segments: anonymous files (memfd) mapped by every rank of a node.
//
// Owns the life of a file descriptor (Fd) and of one mapping (Segment). A segment has no name in
// any file system, so nothing is left when its last holder dies. Never decides what lies in a
// segment.
#ifndef HSGD_OS_SHARED_MEMORY_HPP_
#define HSGD_OS_SHARED_MEMORY_HPP_

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "os/page.hpp"

namespace hsgd {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLargeSegment = 4 * kHugePage;  // from here on on huge pages, where there are some

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
  // A second descriptor of the same file.
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

  // A new segment whose pages are allocated here, after a look at the limits of machine and cgroup:
  // full memory is HSGD_ERR_MEMORY and not SIGBUS later. What does not fill a huge page lies on
  // small ones, unless Linux gives shared memory nothing else (shmem_enabled "always").
  // `at_once`: ranks that allocate as much at the same time. `remedy`: what the user may do about
  // it. `available`: what was left before any of them began, where that is known; otherwise what
  // is left now counts, without what some of them have already.
  static Segment create(size_t bytes, size_t at_once = 1, const char* remedy = "ask for less",
                        std::optional<size_t> available = std::nullopt);
  // Maps a segment that another process made; refuses a file that is smaller than `bytes`.
  static Segment attach(Fd fd, size_t bytes);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }  // only until forget_file()
  // The mapping needs no descriptor, and descriptors are scarce with many ranks.
  void forget_file() { fd_ = Fd(); }

 private:
  Segment(Fd fd, size_t bytes);
  Fd fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Segments side by side: a second mapping of all of them, in one range of addresses.
class Row {
 public:
  Row() = default;
  // All segments have the same size, a multiple of the page size, and their files. Huge pages are
  // mapped as such where it is a multiple of theirs.
  explicit Row(const std::vector<Segment>& segments);
  Row(Row&& other) noexcept;
  Row& operator=(Row&& other) noexcept;
  ~Row();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

void* map_shared(int fd, size_t bytes);
void unmap_shared(void* address, size_t bytes);

// Bytes that may still be allocated: the least of the machine's available memory and of what the
// cgroups of this process leave. `root`: see Cgroups.
size_t available_memory_bytes(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_OS_SHARED_MEMORY_HPP_
