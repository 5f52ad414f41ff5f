// Counting, and failing the n-th call of a function.
#include "faults.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "internal.hpp"

namespace simcuda {
namespace {

constexpr const char kSuffix[] = "_v2";

}  // namespace

Faults::Faults(const char* rules) {
  std::istringstream list(rules == nullptr ? "" : rules);
  for (std::string rule; std::getline(list, rule, ',');) {
    const size_t first = rule.find(':');
    int nth = 0;
    int code = 0;
    if (first == std::string::npos ||
        std::sscanf(rule.c_str() + first, ":%d:%d", &nth, &code) != 2) {
      std::fprintf(stderr, "SIMCUDA_FAIL: %s is not function:n:code\n", rule.c_str());
      std::abort();
    }
    add(rule.substr(0, first), nth, code);
  }
}

void Faults::add(const std::string& function, int nth, int code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  rules_.push_back({function, nth, code});
}

void Faults::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  rules_.clear();
}

int Faults::next(const std::string& function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int code = 0;
  for (Rule& rule : rules_) {
    if (rule.function != function && rule.function + kSuffix != function) continue;
    if (--rule.left == 0 && code == 0) code = rule.code;
  }
  return code;
}

void Faults::leave_out(const std::string& function, int every, int at) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (every <= 0) {
    gaps_.clear();
  } else {
    gaps_.push_back({function, every, at, 0});
  }
}

bool Faults::leaves_out(const std::string& function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool found = false;
  for (Gap& gap : gaps_) {
    if (gap.function != function && gap.function + kSuffix != function) continue;
    found |= gap.seen++ % gap.every == gap.at;
  }
  return found;
}

void Faults::violate(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  violations_.push_back(text);
  ++counters_.violations;
}

const char* Faults::last_violation() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return violations_.empty() ? "" : violations_.back().c_str();
}

void Faults::count(uint64_t simcuda_counters::* counter, int64_t more) {
  const std::lock_guard<std::mutex> lock(mutex_);
  counters_.*counter += static_cast<uint64_t>(more);
}

simcuda_counters Faults::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

void Faults::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  simcuda_counters fresh{};
  fresh.device_allocations_live = counters_.device_allocations_live;
  fresh.registered_bytes_live = counters_.registered_bytes_live;
  fresh.streams_live = counters_.streams_live;
  fresh.events_live = counters_.events_live;
  counters_ = fresh;
}

Faults& faults() {
  static auto* one = new Faults(std::getenv("SIMCUDA_FAIL"));
  return *one;
}

int injected(const char* function) { return faults().next(function); }

void record_violation(const std::string& text) { faults().violate(text); }

}  // namespace simcuda

void simcuda_get_counters(simcuda_counters* counters) { *counters = simcuda::faults().counters(); }

void simcuda_reset_counters() { simcuda::faults().reset(); }

const char* simcuda_last_violation() { return simcuda::faults().last_violation(); }

void simcuda_leave_out(const char* function, int every, int at) {
  simcuda::faults().leave_out(function, every, at);
}

void simcuda_fail(const char* function, int nth_from_now, int code) {
  simcuda::faults().add(function, nth_from_now, code);
}
