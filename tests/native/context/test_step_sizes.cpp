// What a communicator takes of the memory of a node, by ranks per node and nodes.
#include <atomic>
#include <cstdlib>
#include <new>

#include "context/links.hpp"
#include "support/check.hpp"

namespace {

std::atomic<size_t>& allocated() {
  static std::atomic<size_t> bytes{0};
  return bytes;
}

// Of a node that has no others.
class NoTransport final : public hsgd::Transport {
 public:
  explicit NoTransport(int nodes) : nodes_(nodes) {}
  int node_rank() const override { return 0; }
  int node_count() const override { return nodes_; }
  Ticket send(int, hsgd::Channel, const void*, size_t) override { return 0; }
  Ticket receive(int, hsgd::Channel, void*, size_t) override { return 0; }
  bool done(Ticket) override { return false; }
  void part(const hsgd::Parting&) noexcept override {}
  bool heard(hsgd::Parting*) override { return false; }
  bool quiesce(const hsgd::Deadline&) noexcept override { return true; }

 private:
  int nodes_;
};

struct Bytes {
  size_t shared;
  size_t own;  // of all leaders
};

// Of one node, with the options that a context of several nodes has.
Bytes bytes_of_node(int ranks, int nodes, uint32_t wire_dtype) {
  hsgd_options options;
  hsgd_options_default(&options);
  options.wire_dtype = wire_dtype;
  if (nodes > 1) ++options.slots;  // context/context.cpp
  hsgd::Place place;
  place.size = ranks * nodes;
  place.local_size = ranks;
  place.node_count = nodes;
  place.leaders = nodes > 1 ? std::min(ranks, 8) : 0;
  for (int rank = 0; nodes > 1 && rank < place.size; ++rank) {
    place.node_of_rank.push_back(rank / ranks);
  }
  const hsgd::NodeMap map(place.node_of_rank, place.size, 0, 0);
  const hsgd::RoundSchedule rounds(nodes, static_cast<int>(options.wire_radix));
  const hsgd::StepSizes sizes(place, map, rounds, options);
  const hsgd::SegmentLayout layout = sizes.layout();
  const bool one_out_ring = nodes > 1;
  Bytes bytes{layout.bytes(true) + static_cast<size_t>(ranks - 1) * layout.bytes(!one_out_ring), 0};
  for (place.local_rank = 0; place.local_rank < place.leaders; ++place.local_rank) {
    const size_t before = allocated();
    const hsgd::Links links(std::make_unique<NoTransport>(nodes), place, rounds, sizes, options);
    bytes.own += allocated() - before;
  }
  return bytes;
}

}  // namespace

// Counts what is asked for; nothing is given back while it counts.
void* operator new(size_t bytes) {
  allocated() += bytes;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t bytes) { return ::operator new(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocated() += bytes;
  return std::malloc(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t& never) noexcept {
  return ::operator new(bytes, never);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

TEST("a communicator takes at most 4 MB per rank and 64 MB per node, however many there are") {
  for (const uint32_t wire_dtype : {uint32_t{HSGD_FLOAT32}, uint32_t{HSGD_BFLOAT16}}) {
    for (const int ranks : {1, 2, 8, 28, 64, 128, 256}) {
      for (const int nodes : {1, 2, 3, 16, 17, 64, 100, 1000, 1024}) {
        const Bytes bytes = bytes_of_node(ranks, nodes, wire_dtype);
        const size_t most = (static_cast<size_t>(ranks) * 4 + 64) << 20;
        if (!CHECK(bytes.shared + bytes.own <= most)) {
          std::printf("%d nodes of %d ranks: %zu MB shared, %zu MB of leaders\n", nodes, ranks,
                      bytes.shared >> 20, bytes.own >> 20);
        }
      }
    }
  }
}

TEST("what leaders hold does not grow with the number of nodes") {
  const Bytes few = bytes_of_node(64, 64, HSGD_FLOAT32);
  const Bytes many = bytes_of_node(64, 1024, HSGD_FLOAT32);
  CHECK(static_cast<double>(many.own) < 1.5 * static_cast<double>(few.own));
}
