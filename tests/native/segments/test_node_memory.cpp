// Memory of a node: each rank has its part, all see all of it, and one mapping holds it.
#include <sys/stat.h>

#include "core/os/page.hpp"
#include "node/rendezvous/secret.hpp"
#include "node/segments/node_memory.hpp"
#include "node/segments/segment_layout.hpp"
#include "support/ranks.hpp"

namespace {

using hsgd::Deadline;
using hsgd::Member;
using hsgd::NodeMemory;

void share(NodeMemory& memory, const std::string& path, int rank, int size,
           const std::function<void()>& ready = nullptr) {
  hsgd::meet(path, nullptr, rank, std::vector<int>(static_cast<size_t>(size)), Member{},
             memory.bring("ask for less", {}, ready), Deadline(60));
}

std::byte mark(int rank) { return static_cast<std::byte>(rank + 1); }

}  // namespace

TEST("what a rank writes in its part before it comes, all others read") {
  constexpr size_t kFirst = 10000;
  constexpr size_t kBytes = 5000;
  for (const int size : {1, 2, 5}) {
    const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
    ranks::run(size, [&](int rank) {
      NodeMemory memory(rank, size, kFirst, kBytes);
      share(memory, path, rank, size, [&] {
        for (size_t i = 0; i < memory.part_bytes(rank); ++i) {
          CHECK(memory.part(rank)[i] == std::byte{0});
          memory.part(rank)[i] = mark(rank);
        }
      });
      memory.complete(size == 2 ? SIZE_MAX : 0);
      for (int peer = 0; peer < size; ++peer) {
        CHECK_EQ(memory.part_bytes(peer), peer == 0 ? kFirst : kBytes);
        for (size_t i = 0; i < memory.part_bytes(peer); ++i) {
          CHECK(memory.part(peer)[i] == mark(peer));
        }
      }
    });
  }
}

TEST("each rank allocates its share of slots that all use, and together they allocate all") {
  const size_t page = hsgd::page_bytes();
  for (const int size : {1, 2, 3, 7}) {
    for (const hsgd::SharedSlots& slots : {hsgd::SharedSlots{page, 3 * page, 4},
                                           {3 * page, 5 * page / 2, 3},
                                           {0, page / 4, 5},
                                           {2 * page, 40 * page, 1}}) {
      const size_t first = slots.begin + slots.count * slots.bytes + 100;
      size_t taken = 0;
      std::vector<hsgd::MeetingFile> files;
      std::vector<std::unique_ptr<NodeMemory>> memories;
      for (int rank = 0; rank < size; ++rank) {
        memories.push_back(std::make_unique<NodeMemory>(rank, size, first, page, slots));
        files.push_back(memories.back()->bring("ask for less", {}));
      }
      const hsgd::Fd fd = files[0].make();
      size_t before = 0;
      for (int rank = 0; rank < size; ++rank) {
        files[static_cast<size_t>(rank)].prepare(hsgd::Fd(::dup(fd.get())));
        struct stat status{};
        CHECK_EQ(::fstat(fd.get(), &status), 0);
        taken = static_cast<size_t>(status.st_blocks) * 512;
        // No rank takes what another one has taken: an even share of the slots, give or take pages.
        const size_t own = taken - before - (rank == 0 ? hsgd::round_up(slots.begin, page) : page);
        const size_t share = slots.count * slots.bytes / static_cast<size_t>(size);
        CHECK(own <= share + (slots.count + 2) * page);
        before = taken;
      }
      CHECK_EQ(taken, hsgd::round_up(first, page) + static_cast<size_t>(size - 1) * page);
    }
  }
}

TEST("parts are whole pages apart, and large ones huge pages") {
  for (const size_t bytes : {size_t{1}, size_t{5000}, size_t{1} << 20}) {
    const size_t pitch = NodeMemory::pitch(bytes);
    CHECK(pitch >= bytes && pitch < bytes + hsgd::page_bytes());
    CHECK_EQ(pitch % hsgd::page_bytes(), 0U);
  }
  CHECK_EQ(NodeMemory::pitch(hsgd::kLargeSegment + 1), hsgd::kLargeSegment + hsgd::kHugePage);
}

TEST("a part takes the pages of its bytes, and what lies between parts none") {
  constexpr size_t kBytes = hsgd::kLargeSegment + 1;
  NodeMemory memory(0, 1, kBytes, kBytes);
  size_t taken = 0;
  hsgd::MeetingFile file = memory.bring("ask for less", {});
  const hsgd::Fd made = file.make();
  file.prepare(hsgd::Fd::duplicate(made.get()));
  struct stat status{};
  CHECK(::fstat(made.get(), &status) == 0);
  taken = static_cast<size_t>(status.st_blocks) * 512;
  CHECK(taken >= kBytes && taken <= hsgd::kLargeSegment + hsgd::kHugePage);
  CHECK_EQ(static_cast<size_t>(status.st_size), NodeMemory::pitch(kBytes));
}

TEST("memory that is not there is refused before anything is made") {
  NodeMemory memory(0, 1000, 1 << 20, 1 << 20);
  const hsgd::MeetingFile file = memory.bring("ask for less", size_t{1000} << 20);
  CHECK(file.make().valid());
  const hsgd::MeetingFile less = memory.bring("ask for less", (size_t{1000} << 20) - 1);
  CHECK_THROWS(less.make(), "1000 x 1048576 bytes are needed");
}
