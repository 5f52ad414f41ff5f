// Communicators with one rank per node, and SMPI's functions.
#include "collective.hpp"

#include <mpi.h>
#include <unistd.h>

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "core/base/error.hpp"
#include "network/mpi/transport.hpp"

namespace simulation {
namespace {

int rank_here() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int size_of_world() {
  int size = 1;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

hsgd_options options_with(int radix) {
  hsgd_options options;
  hsgd_options_default(&options);
  options.wire_radix = static_cast<uint32_t>(radix);
  options.spin = 0;         // a simulated rank that waits gives way at once
  options.nontemporal = 0;  // nothing is measured at start-up
  options.known_store = 1;
  return options;
}

hsgd::Communicator* communicator_with(int radix) {
  const int rank = rank_here();
  std::vector<int> node_of_rank(static_cast<size_t>(size_of_world()));
  std::iota(node_of_rank.begin(), node_of_rank.end(), 0);
  hsgd::Place place = hsgd::place_on(std::move(node_of_rank), rank);
  MPI_Comm comm = MPI_COMM_NULL;
  PMPI_Comm_dup(MPI_COMM_WORLD, &comm);
  hsgd::Line line{std::make_shared<hsgd::OwnComm>(comm), place.node_of_rank, rank};
  const std::string path = hsgd::text("@hsgd-simulation-%d-%d", static_cast<int>(::getpid()), rank);
  return std::make_unique<hsgd::Communicator>(path, nullptr, std::move(place),
                                              hsgd::make_mpi_transport(std::move(line), nullptr),
                                              options_with(radix))
      .release();
}

}  // namespace

Collectives make_hsgd_collectives(int radix) {
  // Never closed: that is N - 1 messages of each rank, no part of the measurement, and a thousand
  // ranks would take minutes for it.
  hsgd::Communicator* comm = communicator_with(radix);
  const auto counts = std::make_shared<std::vector<uint64_t>>(size_of_world());
  const auto blocks_of = [counts](const Vectors& v) {
    counts->assign(counts->size(), v.count / counts->size());
    return counts->data();
  };
  Collectives all;
  all["allreduce"] = [=](const Vectors& v) {
    comm->allreduce(v.in, v.out, v.count, HSGD_FLOAT32, HSGD_SUM, nullptr);
  };
  all["allgather"] = [=](const Vectors& v) {
    comm->allgather(v.in, v.out, blocks_of(v), HSGD_FLOAT32, nullptr);
  };
  all["reduce_scatter"] = [=](const Vectors& v) {
    comm->reduce_scatter(v.in, v.out, blocks_of(v), HSGD_FLOAT32, HSGD_SUM, nullptr);
  };
  all["alltoall"] = [=](const Vectors& v) {
    const uint64_t* blocks = blocks_of(v);
    comm->alltoall(v.in, blocks, v.out, blocks, HSGD_FLOAT32, nullptr);
  };
  all["broadcast"] = [=](const Vectors& v) {
    comm->broadcast(v.out, v.count, HSGD_FLOAT32, 0, nullptr);
  };
  all["barrier"] = [=](const Vectors&) { comm->barrier(); };
  return all;
}

Collectives make_mpi_collectives() {
  const auto whole = [](const Vectors& v) { return static_cast<int>(v.count); };
  const auto block = [size = size_of_world()](const Vectors& v) {
    return static_cast<int>(v.count) / size;
  };
  Collectives all;
  all["allreduce"] = [=](const Vectors& v) {
    PMPI_Allreduce(v.in, v.out, whole(v), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  all["allgather"] = [=](const Vectors& v) {
    PMPI_Allgather(v.in, block(v), MPI_FLOAT, v.out, block(v), MPI_FLOAT, MPI_COMM_WORLD);
  };
  all["reduce_scatter"] = [=](const Vectors& v) {
    PMPI_Reduce_scatter_block(v.in, v.out, block(v), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  all["alltoall"] = [=](const Vectors& v) {
    PMPI_Alltoall(v.in, block(v), MPI_FLOAT, v.out, block(v), MPI_FLOAT, MPI_COMM_WORLD);
  };
  all["broadcast"] = [=](const Vectors& v) {
    PMPI_Bcast(v.out, whole(v), MPI_FLOAT, 0, MPI_COMM_WORLD);
  };
  all["barrier"] = [](const Vectors&) { PMPI_Barrier(MPI_COMM_WORLD); };
  return all;
}

}  // namespace simulation
