// What a rank does at a fault point; empty but in builds with HSGD_FAULT_POINTS.
#include "core/base/fault_points.hpp"

#ifdef HSGD_FAULT_POINTS

#include <atomic>

#include "hsgd_core.h"

namespace {
// One for the process, which tests need: some points are passed before there is a communicator.
std::atomic<void (*)(const char*)> reached{nullptr};
}  // namespace

// Local. `function` is called with the name of each point that this process comes to, in the thread
// that came there; NULL: none. What it does not return from, the rank does not go on from.
extern "C" HSGD_API void hsgd_on_fault_point(void (*function)(const char* name));

void hsgd_on_fault_point(void (*function)(const char* name)) { reached.store(function); }

void hsgd::reach_fault_point(const char* name) {
  if (const auto function = reached.load()) function(name);
}

#endif  // HSGD_FAULT_POINTS
