// first_count(): the first value of the counters of collectives, steps, messages, wake-ups and
// changes: 0.
//
// In builds with HSGD_FAULT_POINTS (`setup.py fault_points`, for tests only) a test can make all
// ranks begin just below the value at which counters wrap. Call it in .cpp files only: both builds
// share the headers.
#ifndef HSGD_CORE_BASE_FIRST_COUNT_HPP_
#define HSGD_CORE_BASE_FIRST_COUNT_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

#ifdef HSGD_FAULT_POINTS
HSGD_API uint64_t first_count();
#else
constexpr uint64_t first_count() { return 0; }
#endif
// Returns the first value of 32-bit counters, which a futex or a device compares.
inline uint32_t first_count_32() { return static_cast<uint32_t>(first_count()); }

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_FIRST_COUNT_HPP_
