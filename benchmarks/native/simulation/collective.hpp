// One rank's side of the collectives that are simulated.
//
// Owns the two forms of each: hsgd's communicator with one rank per node, over the unchanged MPI
// transport, and SMPI's own functions. Never measures.
#ifndef HSGD_BENCHMARKS_COLLECTIVE_HPP_
#define HSGD_BENCHMARKS_COLLECTIVE_HPP_

#include <cstdint>
#include <memory>
#include <string>

namespace simulation {

// `count` float32 of the whole vector. An allgather, a reduce-scatter and an alltoall take
// count / ranks of them from, or give them to, each rank.
struct Vectors {
  const float* in;
  float* out;
  uint64_t count;
};

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual void allreduce(const Vectors& vectors) = 0;
  virtual void allgather(const Vectors& vectors) = 0;       // in: a block
  virtual void reduce_scatter(const Vectors& vectors) = 0;  // out: a block
  virtual void alltoall(const Vectors& vectors) = 0;
  virtual void broadcast(const Vectors& vectors) = 0;  // out, from rank 0
  virtual void barrier() = 0;
};

// By name; false where there is none.
bool run_collective(Collectives& collectives, const std::string& name, const Vectors& vectors);
bool is_collective(const std::string& name);

// Collective over MPI_COMM_WORLD.
std::unique_ptr<Collectives> make_hsgd_collectives(int radix);
std::unique_ptr<Collectives> make_mpi_collectives();

}  // namespace simulation

#endif  // HSGD_BENCHMARKS_COLLECTIVE_HPP_
