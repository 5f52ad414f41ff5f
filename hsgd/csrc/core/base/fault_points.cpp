// The call of a test's function at a fault point; empty in builds without HSGD_FAULT_POINTS.
#include "core/base/fault_points.hpp"

#ifdef HSGD_FAULT_POINTS

#include <atomic>

#include "hsgd_core.h"

namespace {
// One function per process: some points are reached before a communicator exists.
std::atomic<void (*)(const char*)> reached{nullptr};
}  // namespace

// Local. Sets the function that is called with the name of each point that this process reaches, in
// the thread that reached it; NULL: none. If the function does not return, the rank does not
// continue.
extern "C" HSGD_API void hsgd_on_fault_point(void (*function)(const char* name));

void hsgd_on_fault_point(void (*function)(const char* name)) { reached.store(function); }

void hsgd::reach_fault_point(const char* name) {
  if (const auto function = reached.load()) function(name);
}

#endif  // HSGD_FAULT_POINTS
