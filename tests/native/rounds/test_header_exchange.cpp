// What travels with the headers: first steps of pipelines, and what becomes of them where nodes
// call different things.
#include <cstring>
#include <memory>

#include "network/rounds/header_exchange.hpp"
#include "network/rounds/slice_allgather.hpp"
#include "network/rounds/slice_allreduce.hpp"
#include "network/rounds/slice_broadcast.hpp"
#include "support/leaders.hpp"

namespace {

using hsgd::HeaderExchange;
using hsgd::RoundSchedule;
using leaders::expected_sum;
using leaders::kMostNodes;
using leaders::Leaders;
using leaders::part_begins;
using leaders::reduction_of;
using leaders::sum_of;
using leaders::until_all;

constexpr HeaderExchange::Room kSmall{64, 0, 0};
// In one round, in several, and with nodes that take no part in them.
constexpr int kNodes[] = {2, 3, 5, 16, 17, 37, 64};

hsgd::WireHeader header_of(size_t node, uint64_t sequence = 1) {
  hsgd::WireHeader header{};
  header.sequence = sequence;
  header.call.rank = static_cast<int32_t>(node);
  header.note.imbalance = node;
  return header;
}

HeaderExchange::Room room_for(const RoundSchedule& rounds, size_t slice_bytes) {
  const auto least = static_cast<size_t>(rounds.radix(rounds.rounds() - 1));
  const size_t part = hsgd::SliceAllreduce::most_part_bytes(rounds, slice_bytes);
  return {64, std::max(part, slice_bytes / least + 512), slice_bytes};
}

std::vector<std::unique_ptr<HeaderExchange>> headers_of(Leaders& leaders,
                                                        const HeaderExchange::Room& room) {
  std::vector<std::unique_ptr<HeaderExchange>> headers;
  for (size_t node = 0; node < leaders.size(); ++node) {
    headers.push_back(std::make_unique<HeaderExchange>(*leaders.transports[node], leaders.rounds,
                                                       room, leaders.counters[node]));
  }
  return headers;
}

// Windows of a kind on all nodes, and the data of each step. The first step travels with the
// headers, the second by itself.
template <class Window>
struct Steps {
  static constexpr uint64_t kSteps = 2;
  std::vector<std::unique_ptr<Window>> windows;
  std::vector<std::vector<std::vector<std::byte>>> data;  // by node and step

  // begin(window, data) begins a step.
  template <class Begin>
  void run(Leaders& leaders, const HeaderExchange::Room& room, Begin&& begin) {
    const auto headers = headers_of(leaders, room);
    for (size_t node = 0; node < leaders.size(); ++node) {
      hsgd::RoundPayload* first = windows[node]->with_headers();
      begin(*windows[node], data[node][0].data());
      headers[node]->start(header_of(node), first);
    }
    until_all(leaders.size(), [&](size_t node) { return headers[node]->done(); });
    for (const auto& each : headers) CHECK_EQ(each->header().status, HSGD_OK);
    CHECK_EQ(leaders.most_messages(), leaders.rounds.messages());
    for (size_t node = 0; node < leaders.size(); ++node) {
      begin(*windows[node], data[node][1].data());
    }
    until_all(leaders.size(), [&](size_t node) {
      windows[node]->progress();
      return windows[node]->finished() == kSteps;
    });
  }
};

Steps<hsgd::SliceAllreduce> sums_of(Leaders& leaders, const ranks::Operation& operation,
                                    size_t slice_bytes, hsgd::SliceAllreduce::Form form) {
  Steps<hsgd::SliceAllreduce> steps;
  for (size_t node = 0; node < leaders.size(); ++node) {
    steps.windows.push_back(std::make_unique<hsgd::SliceAllreduce>(
        *leaders.transports[node], leaders.rounds, slice_bytes, 2, false, leaders.counters[node]));
    steps.windows[node]->start(reduction_of(operation.dtype), form);
    steps.data.emplace_back(2, ranks::input_of(operation, static_cast<int>(node)));
  }
  return steps;
}

void check_sums(int nodes, const ranks::Operation& operation, uint64_t seed) {
  Leaders leaders(nodes, 16, seed);
  const size_t slice_bytes = operation.bytes() + 128;
  auto steps = sums_of(leaders, operation, slice_bytes, hsgd::SliceAllreduce::Form::kWhole);
  steps.run(leaders, room_for(leaders.rounds, slice_bytes),
            [&](auto& window, std::byte* data) { window.begin(data, operation.count); });
  const auto wanted = expected_sum(operation, nodes, 16);
  for (const auto& of_node : steps.data) {
    CHECK(of_node[0] == wanted);
    CHECK(of_node[1] == wanted);
  }
}

std::vector<std::byte> some_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 % 251);
  return bytes;
}

// What a node calls: a step of a pipeline, of so many elements; a small payload; or nothing.
enum class Called { kStep, kOtherStep, kSmall, kNothing };

// All nodes call one thing and `odd` another; then all call the same.
void check_mismatch(int nodes, int odd, Called usual, Called other) {
  Leaders leaders(nodes, 16, static_cast<uint64_t>(odd + 2));
  const auto operation = sum_of(HSGD_FLOAT32, 4099);
  const size_t slice_bytes = operation.bytes() + 128;
  auto steps = sums_of(leaders, operation, slice_bytes, hsgd::SliceAllreduce::Form::kWhole);
  const auto headers = headers_of(leaders, room_for(leaders.rounds, slice_bytes));
  std::vector<std::byte> small(64);
  const auto start = [&](size_t node, Called called, uint64_t sequence) {
    hsgd::WireHeader header = header_of(node, sequence);
    header.call.signature.count = static_cast<uint64_t>(called) + 1;
    if (called == Called::kNothing) return headers[node]->start(header, {}, {}, nullptr);
    if (called == Called::kSmall) {
      const auto merge = [](const auto&, std::byte*, bool) { return size_t{64}; };
      return headers[node]->start(header, {small.data(), 64}, merge, small.data());
    }
    hsgd::SliceAllreduce& window = *steps.windows[node];
    window.start(reduction_of(operation.dtype));
    hsgd::RoundPayload* first = window.with_headers();
    window.begin(steps.data[node][sequence - 1].data(),
                 called == Called::kStep ? operation.count : 1000);
    headers[node]->start(header, first);
  };
  for (size_t node = 0; node < leaders.size(); ++node) {
    start(node, static_cast<int>(node) == odd ? other : usual, 1);
  }
  until_all(leaders.size(), [&](size_t node) { return headers[node]->done(); });
  CHECK_EQ(leaders.most_messages(), leaders.rounds.messages());
  for (const auto& each : headers) {
    const hsgd::WireHeader& told = each->header();
    CHECK_EQ(told.status, HSGD_ERR_SIGNATURE);
    CHECK_EQ(told.call.rank, headers[0]->header().call.rank);
    CHECK(told.call.rank == odd || told.other.rank == odd);
  }
  for (size_t node = 0; node < leaders.size(); ++node) start(node, Called::kStep, 2);
  until_all(leaders.size(), [&](size_t node) { return headers[node]->done(); });
  until_all(leaders.size(), [&](size_t node) {
    steps.windows[node]->progress();
    return steps.windows[node]->finished() == 1;
  });
  const auto wanted = expected_sum(operation, nodes, 16);
  for (const auto& of_node : steps.data) CHECK(of_node[1] == wanted);
}

}  // namespace

TEST("headers of many nodes are put together in messages by the logarithm of their number") {
  for (const int nodes : {2, 16, 17, 64, 300, 1000}) {
    if (nodes > kMostNodes) continue;
    Leaders leaders(nodes);
    const auto headers = headers_of(leaders, kSmall);
    for (size_t node = 0; node < leaders.size(); ++node) {
      headers[node]->start(header_of(node), {}, {}, nullptr);
    }
    until_all(leaders.size(), [&](size_t node) { return headers[node]->done(); });
    const auto n = static_cast<uint64_t>(nodes);
    for (const auto& header : headers) {
      CHECK_EQ(header->header().status, HSGD_OK);
      CHECK_EQ(header->header().note.imbalance, n * (n - 1) / 2);
    }
    CHECK_EQ(leaders.most_messages(), leaders.rounds.messages());
    CHECK(leaders.most_messages() <= 16);
  }
}

TEST("all of many nodes hear of the same two ranks that differ, wherever they are") {
  for (const int nodes : {16, 37, 100}) {
    if (nodes > kMostNodes) continue;
    for (const int odd : {0, 1, nodes / 2, nodes - 1}) {
      Leaders leaders(nodes);
      const auto headers = headers_of(leaders, kSmall);
      for (size_t node = 0; node < leaders.size(); ++node) {
        hsgd::WireHeader header = header_of(node);
        header.call.signature.count = static_cast<int>(node) == odd ? 5 : 4;
        headers[node]->start(header, {}, {}, nullptr);
      }
      until_all(leaders.size(), [&](size_t node) { return headers[node]->done(); });
      for (const auto& header : headers) {
        const hsgd::WireHeader& told = header->header();
        CHECK_EQ(told.status, HSGD_ERR_SIGNATURE);
        CHECK_EQ(told.call.rank, headers[0]->header().call.rank);
        CHECK_EQ(told.other.rank, headers[0]->header().other.rank);
        CHECK(told.call.rank == odd || told.other.rank == odd);
        CHECK(told.call.rank != told.other.rank);
      }
    }
  }
}

TEST("sums that travel with the headers are those of steps that do not, in no more messages") {
  for (const int nodes : kNodes) {
    if (nodes > kMostNodes) continue;
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_BFLOAT16, HSGD_FLOAT64}) {
      for (const uint64_t count : {1, 17, 4099}) {
        check_sums(nodes, sum_of(dtype, count), static_cast<uint64_t>(nodes) % 2);
      }
    }
  }
}

TEST("parts of a sum travel with the headers to the nodes that want them") {
  for (const int nodes : kNodes) {
    if (nodes > kMostNodes) continue;
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_BFLOAT16}) {
      Leaders leaders(nodes, 16, 5);
      const std::vector<uint64_t> begins = part_begins(leaders.rounds);
      const auto operation = sum_of(dtype, begins.back());
      const size_t size = hsgd_dtype_bytes(dtype);
      const size_t slice_bytes = leaders.size() * 200 * size + 128;
      auto steps = sums_of(leaders, operation, slice_bytes, hsgd::SliceAllreduce::Form::kParts);
      steps.run(leaders, room_for(leaders.rounds, slice_bytes),
                [&](auto& window, std::byte* data) { window.begin_parts(data, begins); });
      const auto wanted = expected_sum(operation, nodes, 16);
      const std::vector<int> order = leaders.rounds.nodes_by_leaf();
      for (size_t i = 0; i < order.size(); ++i) {
        const auto node = static_cast<size_t>(order[i]);
        const size_t begin = begins[node] * size;
        const bool is_last = i + 1 == order.size();
        const size_t end =
            (is_last ? begins.back() : begins[static_cast<size_t>(order[i + 1])]) * size;
        for (const auto& sums : steps.data[node]) {
          CHECK(std::equal(sums.begin() + static_cast<std::ptrdiff_t>(begin),
                           sums.begin() + static_cast<std::ptrdiff_t>(end),
                           wanted.begin() + static_cast<std::ptrdiff_t>(begin)));
        }
      }
    }
  }
}

TEST("what any root splits travels with the headers") {
  for (const int nodes : kNodes) {
    if (nodes > kMostNodes) continue;
    for (const int root : {0, 1, nodes / 2, nodes - 1}) {
      Leaders leaders(nodes, 16, static_cast<uint64_t>(root));
      const auto wanted = some_bytes(static_cast<size_t>(nodes) * 640 + 13);
      Steps<hsgd::SliceBroadcast> steps;
      for (size_t node = 0; node < leaders.size(); ++node) {
        steps.windows.push_back(std::make_unique<hsgd::SliceBroadcast>(
            *leaders.transports[node], leaders.rounds, 2, leaders.counters[node]));
        steps.windows[node]->start(root);
        const bool is_root = static_cast<int>(node) == root;
        steps.data.emplace_back(2, is_root ? wanted : std::vector<std::byte>(wanted.size()));
      }
      steps.run(leaders, {64, wanted.size(), wanted.size()},
                [&](auto& window, std::byte* data) { window.begin(data, wanted.size()); });
      for (const auto& of_node : steps.data) {
        CHECK(of_node[0] == wanted);
        CHECK(of_node[1] == wanted);
      }
    }
  }
}

TEST("parts of all nodes travel with the headers to all, where no message is too long") {
  for (const int nodes : {2, 3, 5, 16, 32, 64, 300}) {
    if (nodes > kMostNodes) continue;
    Leaders leaders(nodes, 16, 3);
    std::vector<size_t> begins;
    for (const uint64_t begin : part_begins(leaders.rounds)) begins.push_back(begin);
    const auto wanted = some_bytes(begins.back());
    Steps<hsgd::SliceAllgather> steps;
    for (size_t node = 0; node < leaders.size(); ++node) {
      steps.windows.push_back(std::make_unique<hsgd::SliceAllgather>(
          *leaders.transports[node], leaders.rounds, 2, leaders.counters[node]));
      steps.windows[node]->start();
      steps.data.emplace_back(2, std::vector<std::byte>(wanted.size()));
      const size_t bytes = node % 7 == 3 ? 0 : node * 37 % 101;
      for (auto& data : steps.data[node]) {
        std::copy_n(wanted.begin() + static_cast<std::ptrdiff_t>(begins[node]), bytes,
                    data.begin() + static_cast<std::ptrdiff_t>(begins[node]));
      }
    }
    CHECK(!steps.windows[0]->fits(begins, wanted.size() / static_cast<size_t>(nodes) / 2));
    CHECK_EQ(steps.windows[0]->fits(begins, wanted.size()), !leaders.rounds.folds());
    if (leaders.rounds.folds()) continue;
    steps.run(leaders, {64, wanted.size(), wanted.size()},
              [&](auto& window, std::byte* data) { window.begin(data, begins); });
    for (const auto& of_node : steps.data) {
      CHECK(of_node[0] == wanted);
      CHECK(of_node[1] == wanted);
    }
  }
}

TEST("where one of many nodes calls something else all hear of it, and then go on") {
  constexpr std::pair<Called, Called> kCases[] = {
      {Called::kStep, Called::kOtherStep}, {Called::kStep, Called::kSmall},
      {Called::kStep, Called::kNothing},   {Called::kSmall, Called::kStep},
      {Called::kNothing, Called::kStep},   {Called::kOtherStep, Called::kStep},
  };
  for (const int nodes : {2, 3, 5, 16, 17, 37}) {
    if (nodes > kMostNodes) continue;
    for (const int odd : {0, 1, nodes / 2, nodes - 1}) {
      for (const auto& [usual, other] : kCases) check_mismatch(nodes, odd, usual, other);
    }
  }
}
