// Several nodes of several ranks for the native tests, all of them threads, over the in-process
// transport.
//
// Owns how ranks lie on nodes and the communicators. Never knows what the ranks do.
#ifndef HSGD_TESTS_CLUSTER_HPP_
#define HSGD_TESTS_CLUSTER_HPP_

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "support/ranks.hpp"
#include "support/transport_inproc.hpp"

namespace ranks {

// ranks[node] local ranks.
struct Cluster {
  std::vector<int> ranks;
  hsgd_options options;
  hsgd::InprocOptions network;
  bool dealt = false;  // ranks are numbered across the nodes, as cards are dealt, not node by node
  std::string one_thread = {};
  std::vector<int> nic_of_rank = {};  // see hsgd::leaders_of()
  // What a node's leader on lane 0 uses instead of its transport; none: that itself.
  std::function<std::unique_ptr<hsgd::Transport>(std::unique_ptr<hsgd::Transport>)> wrapped = {};

  // Of each node the last rank leads first, then the one before it, ...
  void let_the_last_lead() {
    nic_of_rank.clear();
    for (int rank = 0; rank < size(); ++rank) nic_of_rank.push_back(size() - rank);
  }

  int size() const {
    int size = 0;
    for (const int count : ranks) size += count;
    return size;
  }

  std::vector<int> node_of_rank() const {
    std::vector<int> nodes;
    const int turns = dealt ? *std::max_element(ranks.begin(), ranks.end()) : 1;
    for (int turn = 0; turn < turns; ++turn) {
      for (size_t node = 0; node < ranks.size(); ++node) {
        const int count = !dealt ? ranks[node] : turn < ranks[node] ? 1 : 0;
        nodes.insert(nodes.end(), static_cast<size_t>(count), static_cast<int>(node));
      }
    }
    return nodes;
  }

  // The ranks of each node, in order.
  std::vector<std::vector<int>> ranks_on_nodes() const {
    std::vector<std::vector<int>> nodes(ranks.size());
    const std::vector<int> node_of = node_of_rank();
    for (size_t rank = 0; rank < node_of.size(); ++rank) {
      nodes[static_cast<size_t>(node_of[rank])].push_back(static_cast<int>(rank));
    }
    return nodes;
  }

  hsgd::Place place(int rank) const {
    hsgd::Place place = hsgd::place_on(node_of_rank(), rank, nic_of_rank);
    place.one_thread = one_thread;
    return place;
  }

  // What everybody must hold after an allreduce.
  std::vector<std::byte> expected(const Operation& operation,
                                  hsgd_dtype narrow = HSGD_FLOAT32) const {
    return ::ranks::expected(operation, ranks_on_nodes(), narrow,
                             static_cast<int>(options.wire_radix));
  }

  // body(rank, communicator) on all ranks.
  void run(const std::function<void(int, std::unique_ptr<hsgd::Communicator>&)>& body) const {
    hsgd::InprocOptions wires = network;
    wires.node_count = static_cast<int>(ranks.size());
    const auto joined = hsgd::make_inproc_network(wires);
    const std::string path = ::ranks::meeting_point();
    ::ranks::run(size(), [&](int rank) {
      hsgd::Place own = place(rank);
      std::unique_ptr<hsgd::Transport> transport;
      if (own.lane >= 0) {
        transport = hsgd::make_inproc_transport(joined, own.node_rank, own.lane);
        if (wrapped && own.lane == 0) transport = wrapped(std::move(transport));
      }
      const std::string node = path + "-" + std::to_string(own.node_rank);
      auto communicator = std::make_unique<hsgd::Communicator>(node, nullptr, std::move(own),
                                                               std::move(transport), options);
      body(rank, communicator);
    });
  }
};

inline const std::vector<std::vector<int>> kLayouts = {
    {2, 2}, {2, 1}, {1, 1, 1}, {3, 2, 1}, {1, 1, 1, 1, 1}};

inline hsgd_status status_of(const std::function<void()>& call, std::string* message = nullptr) {
  try {
    call();
    return HSGD_OK;
  } catch (const hsgd::Error& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
}

}  // namespace ranks

#endif  // HSGD_TESTS_CLUSTER_HPP_
