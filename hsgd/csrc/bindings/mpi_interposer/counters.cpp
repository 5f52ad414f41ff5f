// The interposer's counters and their report.
#include "bindings/mpi_interposer/counters.hpp"

#include <atomic>
#include <cstddef>
#include <cstdio>

namespace hsgd::pmpi {
namespace {

constexpr auto kCollectives = static_cast<size_t>(Collective::kCount);
constexpr const char* kNames[kCollectives] = {
    "MPI_Allreduce",
    "MPI_Bcast",
    "MPI_Barrier",
    "MPI_Allgather",
    "MPI_Allgatherv",
    "MPI_Reduce_scatter",
    "MPI_Reduce_scatter_block",
};

// The counts of one collective. Each has its own cache line, because threads may be in different
// collectives. Relaxed: the numbers are only reported and order nothing.
struct alignas(64) Tally {
  std::atomic<uint64_t> taken_calls{0}, taken_bytes{0}, passed_calls{0}, passed_bytes{0};
};
Tally tallies[kCollectives];

void add(std::atomic<uint64_t>& counter, uint64_t number) {
  counter.fetch_add(number, std::memory_order_relaxed);
}

double mega(uint64_t bytes) { return static_cast<double>(bytes) * 1e-6; }

template <class... Words>
std::string format(const char* pattern, Words... words) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, words...);
  return text;
}

std::string report_of(const char* name, const Counts& counts) {
  return format(
      "%s: %llu calls with %.3f MB took the two-level path, %llu with %.3f MB passed "
      "through to MPI; ",
      name, static_cast<unsigned long long>(counts.taken_calls), mega(counts.taken_bytes),
      static_cast<unsigned long long>(counts.passed_calls), mega(counts.passed_bytes));
}

}  // namespace

const char* name_of(Collective collective) { return kNames[static_cast<size_t>(collective)]; }

void count_taken(Collective collective, uint64_t bytes) {
  Tally& tally = tallies[static_cast<size_t>(collective)];
  add(tally.taken_calls, 1);
  add(tally.taken_bytes, bytes);
}

void count_passed(Collective collective, uint64_t bytes) {
  Tally& tally = tallies[static_cast<size_t>(collective)];
  add(tally.passed_calls, 1);
  if (bytes > 0) add(tally.passed_bytes, bytes);
}

Counts counts_of(Collective collective) {
  const Tally& tally = tallies[static_cast<size_t>(collective)];
  return {tally.taken_calls, tally.taken_bytes, tally.passed_calls, tally.passed_bytes};
}

Counts counts_of_all() {
  Counts sum{};
  for (size_t i = 0; i < kCollectives; ++i) {
    const Counts counts = counts_of(static_cast<Collective>(i));
    sum.taken_calls += counts.taken_calls;
    sum.taken_bytes += counts.taken_bytes;
    sum.passed_calls += counts.passed_calls;
    sum.passed_bytes += counts.passed_bytes;
  }
  return sum;
}

std::string report_line(int rank, const hsgd_counters& sum) {
  std::string line = format("hsgd: rank %d: ", rank);
  for (size_t i = 0; i < kCollectives; ++i) {
    const Counts counts = counts_of(static_cast<Collective>(i));
    if (counts.taken_calls + counts.passed_calls > 0) line += report_of(kNames[i], counts);
  }
  return line + format(
                    "%.3f MB moved inside the node, %.3f MB sent to and %.3f MB received from "
                    "other nodes, %.3f s, of which %.3f s waiting\n",
                    mega(sum.intra_bytes), mega(sum.inter_bytes_sent),
                    mega(sum.inter_bytes_received), static_cast<double>(sum.total_ns) * 1e-9,
                    static_cast<double>(sum.wait_ns) * 1e-9);
}

}  // namespace hsgd::pmpi
