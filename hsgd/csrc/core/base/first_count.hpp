// Where the counters of collectives, steps, messages, wake-ups and changes begin: at 0.
//
// Owns nothing but that. In builds with HSGD_FAULT_POINTS (`setup.py fault_points`, for tests only)
// a test may have them begin just below where they wrap, equally on all ranks. Called in sources
// alone: objects of both builds share the headers.
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
// Of words that a futex or a device compares.
inline uint32_t first_count_32() { return static_cast<uint32_t>(first_count()); }

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_FIRST_COUNT_HPP_
