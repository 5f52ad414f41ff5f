// Time and waiting of the core under SimGrid's SMPI, whose ranks are coroutines of one process.
//
// Owns what the linker puts in the place of functions that the core's sources call (-Wl,--wrap, see
// setup.py): the monotonic clock tells simulated time; whoever yields, sleeps or waits at a futex
// waits for its messages instead, in simulated time, so that the simulator goes on. The sources
// themselves are unchanged. Counts messages on the way. Never decides what is sent.
#ifndef HSGD_BENCHMARKS_SIMULATED_TIME_HPP_
#define HSGD_BENCHMARKS_SIMULATED_TIME_HPP_

#include <cstdint>

namespace simulation {

struct Sent {
  uint64_t messages = 0;
  uint64_t bytes = 0;
};

// What the calling rank has sent by PMPI_Isend, which is what the core's transport calls.
Sent sent_by_this_rank();

}  // namespace simulation

#endif  // HSGD_BENCHMARKS_SIMULATED_TIME_HPP_
