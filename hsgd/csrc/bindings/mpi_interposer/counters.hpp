// Counts the calls of each collective that the interposer took and that it passed on, and reports
// them.
//
// Never calls MPI.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_COUNTERS_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_COUNTERS_HPP_

#include <cstdint>
#include <string>

#include "hsgd_core.h"

namespace hsgd::pmpi {

enum class Collective : uint8_t {
  kAllreduce,
  kBcast,
  kBarrier,
  kAllgather,
  kAllgatherv,
  kReduceScatter,
  kReduceScatterBlock,
  kCount
};

struct Counts {
  uint64_t taken_calls, taken_bytes, passed_calls, passed_bytes;
};

const char* name_of(Collective collective);
void count_taken(Collective collective, uint64_t bytes);
// Counts a call that was passed on to MPI, also if it fails; `bytes` is 0 if they were not
// computed.
void count_passed(Collective collective, uint64_t bytes);
Counts counts_of(Collective collective);
Counts counts_of_all();

// Returns a line such as "hsgd: rank 0: MPI_Allreduce: 3 calls with 1.200 MB took the two-level
// path, ...
// "; `sum` holds the core's counters of the taken calls.
std::string report_line(int rank, const hsgd_counters& sum);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_COUNTERS_HPP_
