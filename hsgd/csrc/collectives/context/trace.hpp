// Recorder: records the time that collectives spend on each level, for timelines.
//
// Keeps the records of finished collectives until they are taken. Off by default; then it costs one
// comparison for each piece of work. Never waits.
#ifndef HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_
#define HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "core/os/wait.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Runs `work` and adds its time to one level of a collective, if it returns true (it made
// progress). `record` is nullptr if nothing is recorded.
template <class Work>
bool at_level(hsgd_record* record, hsgd_span hsgd_record::* level, Work&& work) {
  if (record == nullptr) return work();
  const auto begin_ns = static_cast<uint64_t>(now_ns());
  if (!work()) return false;
  hsgd_span& span = record->*level;
  if (span.begin_ns == 0) span.begin_ns = begin_ns;
  span.end_ns = static_cast<uint64_t>(now_ns());
  span.busy_ns += span.end_ns - begin_ns;
  return true;
}

class Recorder {
 public:
  // Keeps the last `capacity` records from now on; 0 drops all and stops. May be called from any
  // thread.
  void keep(uint64_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    capacity_.store(capacity, std::memory_order_relaxed);
    drop_to(capacity);
  }

  // Moves at most `most` records to `records`, oldest first. May be called from any thread.
  uint64_t take(hsgd_record* records, uint64_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t taken = 0;
    for (; taken < most && !records_.empty(); ++taken) {
      records[taken] = records_.front();
      records_.pop_front();
    }
    return taken;
  }

  // Begins a record; called by the thread that executes collectives. The load is relaxed: a
  // collective that begins right after keep() may not be recorded.
  void begin(const char* name, uint64_t bytes) {
    recording_ = capacity_.load(std::memory_order_relaxed) > 0;
    if (!recording_) return;
    current_ = {};
    if (name != nullptr) std::strncpy(current_.name, name, sizeof current_.name - 1);
    current_.bytes = bytes;
    current_.call.begin_ns = static_cast<uint64_t>(now_ns());
  }
  // Ends the record of a collective that succeeded.
  void end(uint64_t wait_ns) {
    if (!recording_) return;
    recording_ = false;
    hsgd_span& call = current_.call;
    call.end_ns = static_cast<uint64_t>(now_ns());
    const uint64_t total_ns = call.end_ns - call.begin_ns;
    call.busy_ns = total_ns > wait_ns ? total_ns - wait_ns : 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    records_.push_back(current_);
    drop_to(capacity_.load(std::memory_order_relaxed));
  }
  // Returns the record of the collective in progress.
  hsgd_record* current() { return recording_ ? &current_ : nullptr; }

 private:
  void drop_to(uint64_t capacity) {
    while (records_.size() > capacity) records_.pop_front();
  }

  std::atomic<uint64_t> capacity_{0};
  bool recording_ = false;
  hsgd_record current_{};
  std::mutex mutex_;  // guards the members below
  std::deque<hsgd_record> records_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_
