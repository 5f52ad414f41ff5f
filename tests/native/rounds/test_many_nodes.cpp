// What leaders of many nodes send one another, all of them in one thread: nothing of it blocks.
#include <cstring>
#include <memory>

#include "network/rounds/slice_allgather.hpp"
#include "network/rounds/slice_allreduce.hpp"
#include "network/rounds/slice_broadcast.hpp"
#include "support/leaders.hpp"

namespace {

using hsgd::RoundSchedule;
using leaders::expected_sum;
using leaders::kMostNodes;
using leaders::Leaders;
using leaders::part_begins;
using leaders::reduction_of;
using leaders::sum_of;
using leaders::until_all;

// Steps of an allreduce that are in flight together, as the pipeline has them.
void run_allreduce(Leaders& leaders, const ranks::Operation& operation, uint64_t steps, int radix) {
  std::vector<std::unique_ptr<hsgd::SliceAllreduce>> slices;
  std::vector<std::vector<std::vector<std::byte>>> data(leaders.size());
  const hsgd::Reduction reduction = reduction_of(operation.dtype);
  for (size_t node = 0; node < leaders.size(); ++node) {
    slices.push_back(std::make_unique<hsgd::SliceAllreduce>(*leaders.transports[node],
                                                            leaders.rounds, operation.bytes() + 128,
                                                            steps, false, leaders.counters[node]));
    slices[node]->start(reduction);
    for (uint64_t step = 0; step < steps; ++step) {
      data[node].push_back(ranks::input_of(operation, static_cast<int>(node)));
      slices[node]->begin(data[node][step].data(), operation.count);
    }
  }
  until_all(leaders.size(), [&](size_t node) {
    slices[node]->progress();
    return slices[node]->finished() == steps;
  });
  const auto wanted = expected_sum(operation, static_cast<int>(leaders.size()), radix);
  for (const auto& of_node : data) {
    for (const auto& sums : of_node) CHECK(sums == wanted);
  }
}

// Two steps of a reduce_scatter in flight. `begins`: in the order of leaves, in which the expected
// sum lies as well.
void run_parts(Leaders& leaders, const ranks::Operation& operation,
               const std::vector<uint64_t>& begins) {
  constexpr uint64_t kSteps = 2;
  // No part is larger than 100 elements, nor what a core and its partner have than 200.
  const size_t size = hsgd_dtype_bytes(operation.dtype);
  const size_t slice_bytes = leaders.size() * 200 * size + 128;
  const hsgd::Reduction reduction = reduction_of(operation.dtype);
  std::vector<std::unique_ptr<hsgd::SliceAllreduce>> slices;
  std::vector<std::vector<std::vector<std::byte>>> data(leaders.size());
  for (size_t node = 0; node < leaders.size(); ++node) {
    slices.push_back(std::make_unique<hsgd::SliceAllreduce>(*leaders.transports[node],
                                                            leaders.rounds, slice_bytes, kSteps,
                                                            false, leaders.counters[node]));
    slices[node]->start(reduction, hsgd::SliceAllreduce::Form::kParts);
  }
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (size_t node = 0; node < leaders.size(); ++node) {
      data[node].push_back(ranks::input_of(operation, static_cast<int>(node)));
      slices[node]->begin_parts(data[node][step].data(), begins);
    }
  }
  until_all(leaders.size(), [&](size_t node) {
    slices[node]->progress();
    return slices[node]->finished() == kSteps;
  });
  const auto wanted = expected_sum(operation, static_cast<int>(leaders.size()), 16);
  const std::vector<int> order = leaders.rounds.nodes_by_leaf();
  for (size_t i = 0; i < order.size(); ++i) {
    const auto node = static_cast<size_t>(order[i]);
    const size_t begin = begins[node] * size;
    const size_t end =
        (i + 1 < order.size() ? begins[static_cast<size_t>(order[i + 1])] : begins.back()) * size;
    for (const auto& sums : data[node]) {
      CHECK(end == begin ||
            std::memcmp(sums.data() + begin, wanted.data() + begin, end - begin) == 0);
    }
  }
}

}  // namespace

TEST("sums of 2 to 64 nodes have the order of the schedule, in one message per node of a group") {
  for (int nodes = 2; nodes <= 64; ++nodes) {
    if (nodes > kMostNodes) continue;
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_BFLOAT16}) {
      Leaders leaders(nodes);
      run_allreduce(leaders, sum_of(dtype, 4099), 1, 16);
      const RoundSchedule& rounds = leaders.rounds;
      CHECK_EQ(leaders.most_messages(), 2 * rounds.messages() - (rounds.folds() ? 1 : 0));
    }
  }
}

TEST("sums of many nodes have the order of the schedule, and as many messages as its logarithm") {
  for (const auto& [nodes, most] : {std::pair<int, int>{16, 12},
                                    {17, 11},
                                    {37, 15},
                                    {64, 18},
                                    {100, 22},
                                    {257, 27},
                                    {1000, 32}}) {
    if (nodes > kMostNodes) continue;
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_BFLOAT16}) {
      Leaders leaders(nodes);
      run_allreduce(leaders, sum_of(dtype, 40000), 1, 16);
      CHECK(leaders.most_messages() <= most);
    }
  }
}

TEST("several steps in flight do not mix, whatever the order of arrival") {
  for (const int nodes : {5, 6, 11, 24}) {
    if (nodes > kMostNodes) continue;
    for (const uint64_t count : {1, 3, 700}) {
      Leaders leaders(nodes, 3, 9);
      run_allreduce(leaders, sum_of(HSGD_BFLOAT16, count), 4, 3);
    }
  }
}

TEST("a node sends 2 (N - 1) / N of the bytes of an allreduce, in rounds as well") {
  const ranks::Operation operation = sum_of(HSGD_FLOAT32, 1 << 16);
  for (const int nodes : {8, 36, 64}) {
    if (nodes > kMostNodes) continue;
    Leaders leaders(nodes);
    run_allreduce(leaders, operation, 1, 16);
    const double share = 2.0 * (nodes - 1) / nodes * static_cast<double>(operation.bytes());
    for (const hsgd::WireCounters& counters : leaders.counters) {
      CHECK(static_cast<double>(counters.bytes_sent) < 1.02 * share);
      CHECK(static_cast<double>(counters.bytes_received) < 1.02 * share);
    }
  }
}

TEST("each of 2 to 64 nodes gets its part of a sum, and sends what is not its own once") {
  for (int nodes = 2; nodes <= 64; ++nodes) {
    if (nodes > kMostNodes) continue;
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_BFLOAT16}) {
      Leaders leaders(nodes, 16, static_cast<uint64_t>(nodes));
      const RoundSchedule& rounds = leaders.rounds;
      const std::vector<uint64_t> begins = part_begins(rounds);
      run_parts(leaders, sum_of(dtype, begins.back()), begins);
      CHECK(leaders.most_messages() <= 2 * rounds.messages());  // of two steps
      // More, as docs/internals/scale.md says.
      if (rounds.folds() || (dtype == HSGD_BFLOAT16 && !rounds.is_direct())) continue;
      const std::vector<int> order = rounds.nodes_by_leaf();
      for (size_t i = 0; i < order.size(); ++i) {
        const auto node = static_cast<size_t>(order[i]);
        const uint64_t end =
            i + 1 < order.size() ? begins[static_cast<size_t>(order[i + 1])] : begins.back();
        const uint64_t not_own = begins.back() - (end - begins[node]);
        CHECK_EQ(leaders.counters[node].bytes_sent, 2 * not_own * hsgd_dtype_bytes(dtype));
      }
    }
  }
}

TEST("parts of any size reach all of many nodes") {
  for (const int nodes : {3, 16, 19, 40, 300}) {
    if (nodes > kMostNodes) continue;
    Leaders leaders(nodes, 16, 3);
    // Where the part of each node begins.
    std::vector<size_t> begins(static_cast<size_t>(nodes) + 1);
    for (const int node : leaders.rounds.nodes_by_leaf()) {
      begins[static_cast<size_t>(node)] = begins.back();
      begins.back() += node % 7 == 3 ? 0 : static_cast<size_t>(node * 37 % 101);
    }
    std::vector<std::byte> wanted(begins.back());
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<std::byte>(i * 31 % 251);
    std::vector<std::vector<std::byte>> data(leaders.size(), std::vector<std::byte>(wanted.size()));
    std::vector<std::unique_ptr<hsgd::SliceAllgather>> gathers;
    for (size_t node = 0; node < leaders.size(); ++node) {
      const size_t bytes = node % 7 == 3 ? 0 : node * 37 % 101;
      if (bytes > 0) {
        std::memcpy(data[node].data() + begins[node], wanted.data() + begins[node], bytes);
      }
      gathers.push_back(std::make_unique<hsgd::SliceAllgather>(
          *leaders.transports[node], leaders.rounds, 3, leaders.counters[node]));
      gathers[node]->start();
      gathers[node]->begin(data[node].data(), begins);
    }
    until_all(leaders.size(), [&](size_t node) {
      gathers[node]->progress();
      return gathers[node]->finished() == 1;
    });
    for (const auto& of_node : data) CHECK(of_node == wanted);
    CHECK(leaders.most_messages() <= leaders.rounds.messages() + 1);
  }
}

TEST("what any root has reaches 2 to 64 nodes, once each, and no node sends much more") {
  for (int nodes = 2; nodes <= 64; ++nodes) {
    if (nodes > kMostNodes) continue;
    for (const int root : {0, 1, nodes / 2, nodes - 1}) {
      constexpr uint64_t kSteps = 2;
      Leaders leaders(nodes, 16, static_cast<uint64_t>(nodes));
      std::vector<std::byte> wanted(static_cast<size_t>(nodes) * 640 + 13);
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<std::byte>(i * 31 % 251);
      std::vector<std::vector<std::vector<std::byte>>> data(leaders.size());
      std::vector<std::unique_ptr<hsgd::SliceBroadcast>> copies;
      for (size_t node = 0; node < leaders.size(); ++node) {
        copies.push_back(std::make_unique<hsgd::SliceBroadcast>(
            *leaders.transports[node], leaders.rounds, kSteps, leaders.counters[node]));
        copies[node]->start(root);
        const bool is_root = static_cast<int>(node) == root;
        const std::vector<std::byte> own = is_root ? wanted : std::vector<std::byte>(wanted.size());
        data[node].assign(kSteps, own);
        for (auto& step : data[node]) copies[node]->begin(step.data(), step.size());
      }
      until_all(leaders.size(), [&](size_t node) {
        copies[node]->progress();
        return copies[node]->finished() == kSteps;
      });
      const RoundSchedule& rounds = leaders.rounds;
      for (size_t node = 0; node < leaders.size(); ++node) {
        for (const auto& step : data[node]) CHECK(step == wanted);
        const hsgd::WireCounters& counters = leaders.counters[node];
        const bool is_root = static_cast<int>(node) == root;
        CHECK_EQ(counters.bytes_received, is_root ? 0 : kSteps * wanted.size());
        // Where groups are pairs a node sends what it has twice, and partners cost as much again.
        const double most = (rounds.folds() ? 2.0 : 1.0) + (rounds.most_radix() < 3 ? 1.0 : 0.6);
        CHECK(static_cast<double>(counters.bytes_sent) <=
              most * static_cast<double>(kSteps * wanted.size()));
      }
    }
  }
}
