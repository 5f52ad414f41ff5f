// One rank's side of the collectives that are simulated.
//
// Two forms of each: hsgd's communicator with one rank per node, over the unchanged MPI transport,
// and SMPI's own functions.
#ifndef HSGD_BENCHMARKS_COLLECTIVE_HPP_
#define HSGD_BENCHMARKS_COLLECTIVE_HPP_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace simulation {

// `count` float32 of the whole vector. An allgather, a reduce-scatter and an alltoall take
// count / ranks of them from, or give them to, each rank.
struct Vectors {
  const float* in;
  float* out;
  uint64_t count;
};

// What the calling rank does, by the name of a collective. In: a block of an allgather; out: a
// block of a reduce_scatter; a broadcast, from rank 0, is out alone.
using Collectives = std::map<std::string, std::function<void(const Vectors&)>>;

// Collective over MPI_COMM_WORLD.
Collectives make_hsgd_collectives(int radix);
Collectives make_mpi_collectives();

}  // namespace simulation

#endif  // HSGD_BENCHMARKS_COLLECTIVE_HPP_
