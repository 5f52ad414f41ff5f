// What a communicator takes of the memory of a node, by ranks per node and nodes.
#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "collectives/context/allreduce_plan.hpp"
#include "collectives/context/links.hpp"
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
  int awaited_node() const override { return -1; }
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

hsgd_options options_with(uint32_t wire_dtype) {
  hsgd_options options;
  hsgd_options_default(&options);
  options.wire_dtype = wire_dtype;
  return options;
}

hsgd::Place place_of(int rank, int ranks, int nodes) {
  std::vector<int> node_of_rank;
  for (int of = 0; of < ranks * nodes; ++of) node_of_rank.push_back(of / ranks);
  return hsgd::place_on(std::move(node_of_rank), rank);
}

// Of one node, with the options that a context of several nodes has.
Bytes bytes_of_node(int ranks, int nodes, uint32_t wire_dtype) {
  const hsgd_options options = hsgd::with_wire_slots(nodes, options_with(wire_dtype));
  const hsgd::Place place = place_of(0, ranks, nodes);
  const hsgd::NodeMap map(place.node_of_rank, place.size, 0, 0);
  const hsgd::RoundSchedule rounds(nodes, static_cast<int>(options.wire_radix));
  const hsgd::StepSizes sizes(place, map, rounds, options);
  const hsgd::SegmentLayout layout = sizes.layout();
  const bool one_out_ring = nodes > 1;
  Bytes bytes{layout.bytes(true) + static_cast<size_t>(ranks - 1) * layout.bytes(!one_out_ring), 0};
  for (int leader = 0; leader < place.leaders; ++leader) {
    const hsgd::Place own = place_of(leader, ranks, nodes);
    const size_t before = allocated();
    const hsgd::Links links(std::make_unique<NoTransport>(nodes), own, rounds, sizes, options);
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
      for (const int nodes : {1, 2, 3, 16, 17, 64, 100, 104, 338, 910, 1000, 1024}) {
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

TEST("up to sixteen ranks of one node have longer steps, more have no more memory each for it") {
  const auto step_of = [](int ranks, int nodes) {
    const hsgd_options options = options_with(HSGD_FLOAT32);
    const hsgd::Place place = place_of(0, ranks, nodes);
    const hsgd::NodeMap map(place.node_of_rank, place.size, 0, 0);
    const hsgd::RoundSchedule rounds(nodes, static_cast<int>(options.wire_radix));
    return hsgd::StepSizes(place, map, rounds, options).node_step_bytes();
  };
  for (const int ranks : {1, 2, 8, 16}) CHECK_EQ(step_of(ranks, 1), size_t{256 << 10});
  for (const int ranks : {17, 64}) {
    CHECK_EQ(step_of(ranks, 1), size_t{128 << 10});
    CHECK(bytes_of_node(ranks, 1, HSGD_FLOAT32).shared < static_cast<size_t>(ranks) * 900'000);
  }
  CHECK(step_of(2, 2) <= 128 << 10);  // the same on all nodes, which may have more ranks
}

TEST("what leaders hold does not grow with the number of nodes") {
  const Bytes few = bytes_of_node(64, 64, HSGD_FLOAT32);
  const Bytes many = bytes_of_node(64, 1024, HSGD_FLOAT32);
  CHECK(static_cast<double>(many.own) < 1.5 * static_cast<double>(few.own));
}

TEST("a plan says what a communicator would take") {
  for (const uint32_t wire_dtype : {uint32_t{HSGD_FLOAT32}, uint32_t{HSGD_BFLOAT16}}) {
    for (const int ranks : {1, 2, 28, 128}) {
      for (const int nodes : {1, 2, 17, 100, 1024}) {
        const Bytes bytes = bytes_of_node(ranks, nodes, wire_dtype);
        const auto counted = static_cast<double>(bytes.shared + bytes.own);
        const hsgd_allreduce_plan plan =
            hsgd::plan_allreduce(options_with(wire_dtype), nodes, ranks, 1 << 20);
        const auto planned = static_cast<double>(plan.memory_bytes);
        // Headers and tables come on top.
        if (!CHECK(planned <= counted && counted <= planned + 2e6)) {
          std::printf("%d nodes of %d ranks: %g bytes counted, %g planned\n", nodes, ranks, counted,
                      planned);
        }
      }
    }
  }
}

TEST("a plan follows the sizes and the rounds of a communicator") {
  const hsgd_options options = options_with(HSGD_FLOAT32);
  const hsgd_allreduce_plan here = hsgd::plan_allreduce(options, 1, 8, 64 << 20);
  CHECK(here.rounds == 0 && here.messages == 0 && here.leaders == 0 && here.steps > 1);
  const hsgd_allreduce_plan direct = hsgd::plan_allreduce(options, 2, 8, 64 << 20);
  CHECK(direct.rounds == 1 && direct.messages == 1 && direct.leaders == 8);
  const hsgd_allreduce_plan small = hsgd::plan_allreduce(options, 64, 8, 8);
  CHECK(small.steps == 0 && small.leaders == 1);
  CHECK(small.messages == hsgd::RoundSchedule(64, static_cast<int>(options.wire_radix)).messages());
  CHECK_THROWS(hsgd::plan_allreduce(options, 0, 8, 8), "at least 1 of both");
  CHECK_THROWS(hsgd::plan_allreduce(options, 1 << 20, 1 << 20, 8), "at least 1 of both");
}
