// The C interface of communicators over TCP: leaders, and what is made of them.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "capi/handles.hpp"
#include "communicator/communicator.hpp"
#include "context/place.hpp"
#include "hsgd_core.h"
#include "os/wait.hpp"
#include "tcp/listener.hpp"
#include "tcp_transport/tcp_leader.hpp"

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

std::unique_ptr<Communicator> meet_over_tcp(const char* path, Place place, TcpLeader* leader,
                                            const hsgd_options& options) {
  std::unique_ptr<Transport> transport;
  if (place.local_rank < place.leaders) {
    if (leader == nullptr) {
      throw Error(HSGD_ERR_ARGUMENT, place.rank,
                  text("rank %d is leader %d of its node and has no hsgd_leader", place.rank,
                       place.local_rank));
    }
    transport = leader->make_transport(options.timeout_s);
  }
  return std::make_unique<Communicator>(path, nullptr, std::move(place), std::move(transport),
                                        options);
}

}  // namespace
}  // namespace hsgd

int hsgd_most_leaders(void) { return hsgd::kMostLeaders; }
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
    leaders.node = node;
    leader->leader.connect(std::move(leaders),
                           hsgd::Deadline(options->timeout_s, options->interrupted));
  });
}

void hsgd_leader_destroy(hsgd_leader* leader) { delete leader; }

int hsgd_comm_create_over_tcp(const char* path, const int32_t* node_of_rank, int rank, int size,
                              hsgd_leader* leader, const hsgd_options* options, hsgd_comm** comm,
                              hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *comm = nullptr;
    hsgd::check_options(*options);
    const std::vector<int> nodes(node_of_rank, node_of_rank + (size > 0 ? size : 0));
    hsgd::check_ranks(nodes, rank, size);
    *comm = hsgd::new_comm(hsgd::meet_over_tcp(path, hsgd::place_on(nodes, rank),
                                               leader == nullptr ? nullptr : &leader->leader,
                                               *options));
    delete leader;
  });
}
