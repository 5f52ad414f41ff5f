// Segments: shared between mappings, refused when too small or too large, gone with their holders.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include <fstream>

#include "core/os/shared_memory.hpp"
#include "support/kernel.hpp"
#include "support/ranks.hpp"

namespace {

int open_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

hsgd::Fd duplicate(const hsgd::Segment& segment) { return hsgd::Fd(::dup(segment.fd())); }

// Zeroed, of the size that was asked for, and the same memory through a second mapping.
void check_large(size_t bytes) {
  const hsgd::Segment made = hsgd::Segment::create(bytes);
  struct stat status{};
  CHECK(::fstat(made.fd(), &status) == 0);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t taken = static_cast<size_t>(status.st_blocks) * 512;
  CHECK(taken >= (bytes + page - 1) / page * page);
  // Linux may be set to give shared memory nothing but huge pages.
  CHECK(taken <= (bytes + hsgd::kHugePage - 1) / hsgd::kHugePage * hsgd::kHugePage);
  const hsgd::Segment seen = hsgd::Segment::attach(duplicate(made), bytes);
  for (size_t i = 0; i < bytes; i += 511) CHECK(made.data()[i] == std::byte{0});
  for (size_t i = 0; i < bytes; i += 511) made.data()[i] = static_cast<std::byte>(i % 251 + 1);
  made.data()[bytes - 1] = std::byte{255};
  for (size_t i = 0; i < bytes; i += 511) {
    CHECK(seen.data()[i] == static_cast<std::byte>(i % 251 + 1) || i == bytes - 1);
  }
  CHECK(seen.data()[bytes - 1] == std::byte{255});
}

}  // namespace

TEST("a new segment is zeroed, and what one mapping writes the other reads") {
  hsgd::Segment made = hsgd::Segment::create(10000);
  for (size_t i = 0; i < made.bytes(); ++i) CHECK(made.data()[i] == std::byte{0});
  hsgd::Segment seen = hsgd::Segment::attach(duplicate(made), 10000);
  std::memcpy(made.data() + 5000, "hello", 6);
  CHECK_EQ(std::string(reinterpret_cast<char*>(seen.data()) + 5000), "hello");
}

TEST("a segment that is smaller than its layout is refused") {
  const hsgd::Segment made = hsgd::Segment::create(4096);
  CHECK_THROWS(hsgd::Segment::attach(duplicate(made), 8192), "a peer's segment has 4096 bytes");
}

TEST("a segment beyond the memory limits is an exception that says how much is left") {
  const size_t available = hsgd::available_memory_bytes();
  CHECK(available > 1 << 20);
  CHECK_THROWS(hsgd::Segment::create(2 * available), "are left within the limits");
}

TEST("ranks that all looked before one of them took may take all that was left") {
  hsgd::check_memory(10000, 3, "ask for less", 30000);
  CHECK_THROWS(hsgd::check_memory(10000, 3, "ask for less", 29999),
               "3 x 10000 bytes are needed and 29999 are left");
}

TEST("segments and descriptors move, and nothing is left open or mapped") {
  const int before = open_descriptors();
  for (int i = 0; i < 100; ++i) {
    hsgd::Segment one = hsgd::Segment::create(1 << 16);
    std::byte* data = one.data();
    hsgd::Segment two = std::move(one);
    CHECK(one.data() == nullptr);
    CHECK(two.data() == data);
    one = std::move(two);
    CHECK(one.data() == data);
    hsgd::Segment other = hsgd::Segment::attach(duplicate(one), 1 << 16);
    other = std::move(one);
  }
  CHECK_EQ(open_descriptors(), before);
}

TEST("large segments are as others, with huge pages and without") {
  const size_t least = hsgd::kLargeSegment;
  const bool can_switch = kernel::switches_huge_pages();
  for (const unsigned long without : {0UL, 1UL}) {
    CHECK(!can_switch || ::prctl(PR_SET_THP_DISABLE, without, 0, 0, 0) == 0);
    for (const size_t bytes : {least - 1, least, least + 1, 2 * least + hsgd::kHugePage - 5}) {
      check_large(bytes);
    }
  }
  CHECK(!can_switch || ::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0);
}

#if !defined(__SANITIZE_THREAD__)  // which has mappings of its own
namespace {

// Bytes that the mapping at an address has on huge pages.
size_t huge_bytes(const void* address) {
  std::ifstream lines("/proc/self/smaps");
  std::string line;
  bool is_there = false;
  while (std::getline(lines, line)) {
    size_t begin = 0;
    size_t end = 0;
    size_t kib = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx ", &begin, &end) == 2) {
      is_there = begin == reinterpret_cast<uintptr_t>(address);
    } else if (is_there && std::sscanf(line.c_str(), "ShmemPmdMapped: %zu kB", &kib) == 1) {
      return kib << 10;
    }
  }
  return 0;
}

// Whether the kernel gives shared memory as many huge pages at this moment, all of them together.
bool gets_huge_pages(size_t count) {
  const size_t bytes = count * hsgd::kHugePage;
  const int fd = ::memfd_create("test", MFD_CLOEXEC);
  const hsgd::Fd holder(fd);
  CHECK(::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  constexpr int kNone = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* range = ::mmap(nullptr, bytes + hsgd::kHugePage, PROT_NONE, kNone, -1, 0);
  CHECK(range != MAP_FAILED);
  auto* first = static_cast<std::byte*>(range);
  first += -reinterpret_cast<uintptr_t>(first) % hsgd::kHugePage;
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  CHECK(::mmap(first, bytes, kAccess, MAP_SHARED | MAP_FIXED, fd, 0) == first);
  for (size_t at = 0; at < bytes; at += hsgd::kHugePage) first[at] = std::byte{1};
  const bool got = ::madvise(first, bytes, 25) == 0 && huge_bytes(first) == bytes;
  ::munmap(range, bytes + hsgd::kHugePage);
  return got;
}

bool begins_a_huge_page(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % hsgd::kHugePage == 0;
}

}  // namespace

TEST("large segments, and parts of one, are on huge pages where the kernel gives some") {
  constexpr size_t kPages = 2 * hsgd::kLargeSegment / hsgd::kHugePage;
  // Elsewhere in the machine memory comes and goes, and a rank that has to wait for a processor
  // gives up: it is no error that one attempt gets few.
  int could = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const bool could_before = gets_huge_pages(kPages);
    const hsgd::Segment whole = hsgd::Segment::create(hsgd::kLargeSegment);
    hsgd::Fd file = hsgd::new_memory_file(2 * hsgd::kLargeSegment);
    for (const size_t part : {hsgd::kLargeSegment, size_t{0}}) {
      hsgd::allocate_pages(file.get(), part, hsgd::kLargeSegment);
    }
    hsgd::Segment parts = hsgd::Segment::attach_empty(std::move(file), 2 * hsgd::kLargeSegment);
    for (const size_t part : {size_t{0}, hsgd::kLargeSegment}) {
      parts.populate(part, hsgd::kLargeSegment);
    }
    CHECK(begins_a_huge_page(whole.data()));
    CHECK(begins_a_huge_page(parts.data()));
    if (huge_bytes(whole.data()) > 0 && huge_bytes(parts.data()) > hsgd::kLargeSegment) return;
    could += could_before && gets_huge_pages(kPages) ? 1 : 0;  // as many again, beside the others
  }
  CHECK(could < 20);
}
#endif
