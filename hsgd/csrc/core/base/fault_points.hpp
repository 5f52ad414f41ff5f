// HSGD_FAULT_POINT: names a point at which tests end or stop a rank, one in each phase of the
// set-up, of the collectives and of the recovery after a death.
//
// Does nothing, except in builds with HSGD_FAULT_POINTS (`setup.py fault_points`, for tests only):
// there a rank that reaches a point calls the function that the test has set.
#ifndef HSGD_CORE_BASE_FAULT_POINTS_HPP_
#define HSGD_CORE_BASE_FAULT_POINTS_HPP_

#ifdef HSGD_FAULT_POINTS

#include "hsgd_core.h"

namespace hsgd {
HSGD_API void reach_fault_point(const char* name);
}  // namespace hsgd

#define HSGD_FAULT_POINT(name) ::hsgd::reach_fault_point(name)

#else

#define HSGD_FAULT_POINT(name) static_cast<void>(0)

#endif  // HSGD_FAULT_POINTS

#endif  // HSGD_CORE_BASE_FAULT_POINTS_HPP_
