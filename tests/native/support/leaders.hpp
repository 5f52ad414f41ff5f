// Local rank 0 of each of many nodes, all of them in one thread, over the in-process transport.
//
// Owns the transports, which count messages, and what sums are expected. Never blocks.
#ifndef HSGD_TESTS_LEADERS_HPP_
#define HSGD_TESTS_LEADERS_HPP_

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "network/rounds/reduction.hpp"
#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"
#include "support/ranks.hpp"
#include "support/transport_inproc.hpp"

namespace leaders {

// One thread, in which the thread sanitizer has nothing to find and takes minutes for a thousand.
#if defined(__SANITIZE_THREAD__)
constexpr int kMostNodes = 40;
#else
constexpr int kMostNodes = 1000;
#endif

class CountingTransport final : public hsgd::Transport {
 public:
  CountingTransport(std::unique_ptr<hsgd::Transport> below, int* messages)
      : below_(std::move(below)), messages_(messages) {}
  int node_rank() const override { return below_->node_rank(); }
  int node_count() const override { return below_->node_count(); }
  Ticket send(int node, hsgd::Channel channel, const void* data, size_t bytes) override {
    ++*messages_;
    return below_->send(node, channel, data, bytes);
  }
  Ticket receive(int node, hsgd::Channel channel, void* data, size_t capacity_bytes) override {
    return below_->receive(node, channel, data, capacity_bytes);
  }
  bool done(Ticket ticket) override { return below_->done(ticket); }
  int awaited_node() const override { return below_->awaited_node(); }
  void part(const hsgd::Parting& parting) noexcept override { below_->part(parting); }
  bool heard(hsgd::Parting* parting) override { return below_->heard(parting); }
  bool quiesce(const hsgd::Deadline& deadline) noexcept override {
    return below_->quiesce(deadline);
  }

 private:
  std::unique_ptr<hsgd::Transport> below_;
  int* messages_;
};

// Local rank 0 of each node.
struct Leaders {
  hsgd::RoundSchedule rounds;
  std::vector<int> messages;  // sent, by node
  std::vector<hsgd::WireCounters> counters;
  std::vector<std::unique_ptr<hsgd::Transport>> transports;

  explicit Leaders(int nodes, int radix = 16, uint64_t seed = 0)
      : rounds(nodes, radix),
        messages(static_cast<size_t>(nodes)),
        counters(static_cast<size_t>(nodes)) {
    const auto network = hsgd::make_inproc_network({nodes, seed, 4});
    for (int node = 0; node < nodes; ++node) {
      transports.push_back(std::make_unique<CountingTransport>(
          hsgd::make_inproc_transport(network, node, 0), &messages[static_cast<size_t>(node)]));
    }
  }
  size_t size() const { return transports.size(); }
  int most_messages() const { return *std::max_element(messages.begin(), messages.end()); }
};

// Until step(node) has said true for each.
template <class StepOfNode>
void until_all(size_t nodes, StepOfNode&& step) {
  std::vector<bool> done(nodes);
  for (size_t left = nodes; left > 0;) {
    for (size_t node = 0; node < nodes; ++node) {
      if (done[node] || !step(node)) continue;
      done[node] = true;
      --left;
    }
  }
}

inline hsgd::Reduction reduction_of(hsgd_dtype dtype) {
  hsgd::Reduction reduction;
  const hsgd::Isa isa = hsgd::detect_isa();
  reduction.reduce = hsgd::select_reduce(dtype, HSGD_SUM, isa);
  reduction.copy = hsgd::select_copy(isa);
  reduction.element_bytes = hsgd_dtype_bytes(dtype);
  if (dtype == HSGD_BFLOAT16) {
    reduction.widening = {hsgd::select_conversion(dtype, isa),
                          hsgd::select_reduce(HSGD_FLOAT32, HSGD_SUM, isa)};
  }
  return reduction;
}

inline ranks::Operation sum_of(hsgd_dtype dtype, uint64_t count) {
  ranks::Operation operation{};
  operation.dtype = dtype;
  operation.op = HSGD_SUM;
  operation.count = count;
  operation.seed = count + 5;
  return operation;
}

inline std::vector<std::byte> expected_sum(const ranks::Operation& operation, int nodes,
                                           int radix) {
  return ranks::expected(operation,
                         ranks::in_a_row(std::vector<int>(static_cast<size_t>(nodes), 1)),
                         HSGD_FLOAT32, radix);
}

// Where the part of each node begins, some of them empty, and the end of all.
inline std::vector<uint64_t> part_begins(const hsgd::RoundSchedule& rounds) {
  std::vector<uint64_t> begins(static_cast<size_t>(rounds.nodes()) + 1);
  for (const int node : rounds.nodes_by_leaf()) {
    begins[static_cast<size_t>(node)] = begins.back();
    begins.back() += node % 7 == 3 ? 0 : static_cast<uint64_t>(node * 37 % 101);
  }
  return begins;
}

}  // namespace leaders

#endif  // HSGD_TESTS_LEADERS_HPP_
