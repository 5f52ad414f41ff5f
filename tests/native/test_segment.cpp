// Segments: shared between mappings, refused when too small or too large, gone with their holders.
#include <dirent.h>

#include "ranks.hpp"
#include "segment.hpp"

namespace {

int open_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

hsgd::Fd duplicate(const hsgd::Segment& segment) { return hsgd::Fd(::dup(segment.fd())); }

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
