// Points at which tests end or stop a rank: one in each phase of the set-up, of the collectives and
// of what comes after a death.
//
// Owns the macro that names a point. It is nothing but in builds with HSGD_FAULT_POINTS
// (`setup.py fault_points`, for tests only), where a rank that comes to a point calls the function
// that the test gave. Never decides what happens there.
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
