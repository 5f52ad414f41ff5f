// The C interface of communicators over TCP: creates leaders and communicators.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/c/handles.hpp"
#include "collectives/context/place.hpp"
#include "collectives/queue/communicator.hpp"
#include "core/base/status.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/tcp_common/listener.hpp"
#include "network/tcp_messages/tcp_leader.hpp"

struct hsgd_leader {
  hsgd::TcpLeader leader;
};

namespace hsgd {
namespace {

void check_nodes(int nodes, int node) {
  if (nodes >= 1 && node >= 0 && node < nodes) return;
  throw Error(HSGD_ERR_ARGUMENT, -1,
              text("node %d of %d: give a node from 0 to nodes - 1", node, nodes));
}

void check_ranks(const std::vector<int>& node_of_rank, int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(
        HSGD_ERR_ARGUMENT, rank,
        text("rank %d of %d: give a size of at least 1 and a rank from 0 to size - 1", rank, size));
  }
  int known = 0;
  for (const int node : node_of_rank) {
    if (node < 0 || node > known) {
      throw Error(
          HSGD_ERR_ARGUMENT, rank,
          text("node_of_rank has node %d where at most %d was expected; number nodes from 0 "
               "by their first ranks",
               node, known));
    }
    if (node == known) ++known;
  }
}

// The caller's description of all ranks.
struct RankTable {
  RankTable(const int32_t* node_of_rank, const int32_t* nic_of_rank, int rank, int size)
      : nodes(node_of_rank, node_of_rank + std::max(size, 0)),
        nics(nic_of_rank, nic_of_rank + std::max(size, 0)) {
    check_ranks(nodes, rank, size);
  }
  std::vector<int> nodes, nics;
};

std::unique_ptr<Communicator> meet_over_tcp(const char* path, Place place, TcpLeader* leader,
                                            const hsgd_options& options) {
  std::unique_ptr<Transport> transport;
  if (place.lane >= 0) {
    if (leader == nullptr) {
      throw Error(
          HSGD_ERR_ARGUMENT, place.rank,
          text("rank %d is leader %d of its node and has no hsgd_leader", place.rank, place.lane));
    }
    transport = leader->make_transport(options.timeout_s);
  }
  return std::make_unique<Communicator>(path, nullptr, std::move(place), std::move(transport),
                                        options);
}

}  // namespace
}  // namespace hsgd

int hsgd_most_leaders(void) { return hsgd::kMostLeaders; }

int hsgd_leaders(const int32_t* node_of_rank, const int32_t* nic_of_rank, int size,
                 int32_t* leaders, int* count, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    const hsgd::RankTable table(node_of_rank, nic_of_rank, 0, size);
    *count = 0;
    for (const std::vector<int>& lane : hsgd::leaders_of(table.nodes, table.nics)) {
      leaders = std::copy(lane.begin(), lane.end(), leaders);
      *count += static_cast<int>(lane.size());
    }
  });
}

size_t hsgd_leader_address_bytes(void) { return sizeof(hsgd::SocketPlace); }

int hsgd_leader_create(const char* interfaces, int nodes, hsgd_leader** leader, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *leader = nullptr;
    hsgd::check_nodes(nodes, 0);
    *leader = new hsgd_leader{hsgd::TcpLeader(interfaces == nullptr ? "" : interfaces, nodes)};
  });
}

void hsgd_leader_address(const hsgd_leader* leader, void* address) {
  std::memcpy(address, &leader->leader.place(), sizeof(hsgd::SocketPlace));
}

int hsgd_leader_connect(hsgd_leader* leader, const void* addresses, const int32_t* ranks, int nodes,
                        int node, const hsgd_options* options, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    hsgd::check_options(*options);
    hsgd::check_nodes(nodes, node);
    hsgd::TcpLeaders leaders;
    leaders.places.resize(static_cast<size_t>(nodes));
    std::memcpy(leaders.places.data(), addresses,
                leaders.places.size() * sizeof(hsgd::SocketPlace));
    leaders.ranks.assign(ranks, ranks + nodes);
    for (int& rank : leaders.ranks) {
      if (options->rank_names != nullptr) rank = options->rank_names[rank];
    }
    leaders.node = node;
    leader->leader.connect(std::move(leaders),
                           hsgd::Deadline(options->timeout_s, options->interrupted));
  });
}

void hsgd_leader_destroy(hsgd_leader* leader) { delete leader; }

int hsgd_comm_create_over_tcp(const char* path, const int32_t* node_of_rank,
                              const int32_t* nic_of_rank, int rank, int size, hsgd_leader* leader,
                              const hsgd_options* options, hsgd_comm** comm, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *comm = nullptr;
    hsgd::check_options(*options);
    const hsgd::RankTable table(node_of_rank, nic_of_rank, rank, size);
    *comm = hsgd::new_comm(hsgd::meet_over_tcp(path, hsgd::place_on(table.nodes, rank, table.nics),
                                               leader == nullptr ? nullptr : &leader->leader,
                                               *options));
    delete leader;
  });
}
