// Checks the table of ranks, and makes the transport of leaders.
#include "bindings/c/comm_over_tcp.hpp"

#include <memory>
#include <utility>

#include "bindings/c/handles.hpp"
#include "collectives/context/place.hpp"
#include "collectives/queue/communicator.hpp"

namespace hsgd {
namespace {

void check(const RankTable& table, int rank) {
  const int size = static_cast<int>(table.nodes.size());
  if (table.nics.size() != table.nodes.size()) {
    throw_error(HSGD_ERR_ARGUMENT, rank, "nic_of_rank: give one number per rank");
  }
  if (rank < 0 || rank >= size) {
    throw_error(HSGD_ERR_ARGUMENT, rank,
                "rank %d of %d: give a size of at least 1 and a rank from 0 to size - 1", rank,
                size);
  }
  int known = 0;
  for (const int node : table.nodes) {
    if (node < 0 || node > known) {
      throw_error(HSGD_ERR_ARGUMENT, rank,
                  "node_of_rank has node %d where at most %d was expected; number nodes from 0 "
                  "by their first ranks",
                  node, known);
    }
    if (node == known) ++known;
  }
}

}  // namespace

std::vector<std::vector<int>> checked_leaders(const RankTable& table) {
  check(table, 0);
  return leaders_of(table.nodes, table.nics);
}

hsgd_comm* new_comm_over_tcp(const std::string& path, const RankTable& table, int rank,
                             TcpLeader* leader, const hsgd_options& options) {
  check_options(options);
  check(table, rank);
  Place place = place_on(table.nodes, rank, table.nics);
  std::unique_ptr<Transport> transport;
  if (place.lane >= 0) {
    if (leader == nullptr) {
      throw_error(HSGD_ERR_ARGUMENT, rank, "rank %d is leader %d of its node and is not connected",
                  rank, place.lane);
    }
    transport = leader->make_transport(options.timeout_s);
  }
  return new_comm(std::make_unique<Communicator>(path, nullptr, std::move(place),
                                                 std::move(transport), options));
}

}  // namespace hsgd
