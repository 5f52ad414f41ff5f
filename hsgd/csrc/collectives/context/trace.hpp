// What a collective spent its time on, level by level: for timelines.
//
// Owns the records of finished collectives until somebody takes them. Off unless asked for, and
// then costs a comparison for each piece of work. Never waits, and never knows what the work is.
#ifndef HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_
#define HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "core/os/wait.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Does `work`, which says whether it moved anything on, at one level of a collective. `record`:
// nullptr when nobody asks.
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
  // From any thread: the last `capacity` records are kept from now on; 0 forgets all and stops.
  void keep(uint64_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    capacity_.store(capacity, std::memory_order_relaxed);
    drop_to(capacity);
  }

  // From any thread: oldest first.
  uint64_t take(hsgd_record* records, uint64_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t taken = 0;
    for (; taken < most && !records_.empty(); ++taken) {
      records[taken] = records_.front();
      records_.pop_front();
    }
    return taken;
  }

  // The thread that executes collectives: one begins. Relaxed: that the very next collective is
  // recorded already is not promised.
  void begin(const char* name, uint64_t bytes) {
    recording_ = capacity_.load(std::memory_order_relaxed) > 0;
    if (!recording_) return;
    current_ = {};
    if (name != nullptr) std::strncpy(current_.name, name, sizeof current_.name - 1);
    current_.bytes = bytes;
    current_.call.begin_ns = static_cast<uint64_t>(now_ns());
  }
  // It has ended well.
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
  // Of the collective under way.
  hsgd_record* current() { return recording_ ? &current_ : nullptr; }

 private:
  void drop_to(uint64_t capacity) {
    while (records_.size() > capacity) records_.pop_front();
  }

  std::atomic<uint64_t> capacity_{0};
  bool recording_ = false;
  hsgd_record current_{};
  std::mutex mutex_;  // guards what follows
  std::deque<hsgd_record> records_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_TRACE_HPP_
