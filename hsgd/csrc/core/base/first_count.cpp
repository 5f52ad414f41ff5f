// The first value of counters in builds for tests; empty in other builds.
#include "core/base/first_count.hpp"

#ifdef HSGD_FAULT_POINTS

#include <atomic>

namespace {
std::atomic<uint64_t> first{0};
}  // namespace

// Local. Sets the first value of all counters made from now on: a multiple of 8, the same on all
// ranks.
extern "C" HSGD_API void hsgd_count_from(uint64_t count);

void hsgd_count_from(uint64_t count) { first.store(count); }

uint64_t hsgd::first_count() { return first.load(); }

#endif  // HSGD_FAULT_POINTS
