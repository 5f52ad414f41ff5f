// What the simulated ranks run: one collective at several sizes, by hsgd's communicator or by the
// simulator's MPI.
//
// Owns the arguments, the start at the same simulated time on all ranks, and the check of results.
#ifndef HSGD_BENCHMARKS_PROGRAM_HPP_
#define HSGD_BENCHMARKS_PROGRAM_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "collective.hpp"

namespace simulation {

struct Arguments {
  std::string operation = "allreduce";
  bool ours = true;  // else the simulator's MPI
  int radix = 16;    // HSGD_WIRE_RADIX
  int ranks = 1;
  std::vector<uint64_t> bytes;  // of the whole vector
  // What the ranks of a node add before and after a collective: seconds, and seconds per byte.
  double local_s = 0;
  double local_s_per_byte = 0;
};

// One size, as all ranks together saw it.
struct Case {
  double start_s = -1;
  double end_s = 0;
  uint64_t most_messages = 0;  // that a rank sent in one call
  uint64_t most_bytes = 0;
  int finished = 0;  // ranks
  bool checked = false;
  bool right = true;
};

struct Buffers {
  std::vector<float> in;
  std::vector<float> out;
};

class Program {
 public:
  explicit Program(const Arguments& arguments);
  // In the coroutine of each rank. Prints a line of JSON for each size.
  void run_rank();

 private:
  // Whether the vectors of all ranks are one, because their own would be too much memory: the
  // simulated ranks are one process, and a sum has then the same values on all of them.
  bool folds(uint64_t bytes) const;
  void measure(const Collectives& collectives, const Vectors& vectors, Case* one) const;
  void check(const Vectors& vectors, int rank, Case* one) const;
  void print(size_t index) const;

  const Arguments arguments_;
  std::vector<Case> cases_;
  Buffers shared_;
};

}  // namespace simulation

#endif  // HSGD_BENCHMARKS_PROGRAM_HPP_
