// BoxChunks: implements the protocol of a chunk; tests/models/box.pml is a model of it.
#include "onesided/box/chunks.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// The number of failed reads after which a reader tries for the lock.
constexpr int kTries = 16;
constexpr int64_t kSliceNs = 20'000'000;  // one slice of a wait for a lock, between two checks

void init_lock(pthread_mutex_t* lock) {
  pthread_mutexattr_t kind;
  ::pthread_mutexattr_init(&kind);
  ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  const int status = ::pthread_mutex_init(lock, &kind);
  ::pthread_mutexattr_destroy(&kind);
  if (status != 0) {
    throw_error(HSGD_ERR_SYSTEM, -1, "ParameterBox: creating a lock failed: %s",
                std::strerror(status));
  }
}

// Returns 0, EOWNERDEAD, or the error if another process has the lock. Uses the monotonic clock if
// the C library can (glibc 2.30, not musl): otherwise setting the clock lengthens or ends this one
// slice.
int lock_for(pthread_mutex_t* lock, int64_t limit_ns) {
  if (limit_ns == 0) return ::pthread_mutex_trylock(lock);
  timespec until{};
#if defined(__GLIBC__)
  constexpr clockid_t kClock = CLOCK_MONOTONIC;
#else
  constexpr clockid_t kClock = CLOCK_REALTIME;
#endif
  ::clock_gettime(kClock, &until);
  const int64_t end_ns = until.tv_nsec + limit_ns;
  until.tv_sec += end_ns / 1'000'000'000;
  until.tv_nsec = end_ns % 1'000'000'000;
#if defined(__GLIBC__)
  return ::pthread_mutex_clocklock(lock, kClock, &until);
#else
  return ::pthread_mutex_timedlock(lock, &until);
#endif
}

// Issues a release fence for `count` values that are copied next. Streaming stores, which memcpy
// uses by itself for many values, can pass a plain release fence; they need a stronger one, which
// keeps the processor from fetching ahead meanwhile.
void fence_before_copy(uint64_t count, Store store) {
  constexpr uint64_t kMany = 1 << 16;
  if (store == Store::kNonTemporal || count >= kMany) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_release);
  }
}

}  // namespace

void BoxChunks::prepare(std::byte* base, const BoxPlan& plan) {
  for (uint64_t i = 0; i < plan.locks(); ++i) {
    init_lock(&(new (base + plan.lock_offset(i)) BoxLock{})->lock);
  }
  for (uint64_t i = 0; i < plan.chunks(); ++i) {
    auto* chunk = new (base + plan.chunk_offset(i)) BoxChunk{};
    chunk->state.store(BoxState::home_of(first_count()).word(), std::memory_order_relaxed);
  }
  for (uint32_t i = 0; i < plan.journals(); ++i) {
    auto* journal = new (base + plan.journal_offset(i)) BoxJournal{};
    init_lock(&journal->lock);
    journal->chunk.store(BoxJournal::kNone, std::memory_order_relaxed);
  }
}

BoxChunks::BoxChunks(std::byte* base, const BoxPlan& plan)
    : base_(base), plan_(plan), copy_(select_copy(detect_isa())), pid_(::getpid()) {}

uint64_t BoxChunks::values_in(uint64_t chunk) const {
  return std::min(plan_.chunk_count, plan_.count - chunk * plan_.chunk_count);
}

BoxChunks::Part BoxChunks::part_of(uint64_t chunk, uint64_t offset, uint64_t count) const {
  const uint64_t start = chunk * plan_.chunk_count;
  const uint64_t begin = std::max(start, offset);
  const uint64_t end = std::min(start + values_in(chunk), offset + count);
  return {chunk, begin - start, end - begin, begin - offset};
}

// --- locks ---

bool BoxChunks::take_lock(uint64_t lock, int64_t limit_ns) const {
  BoxLock& held = lock_at(lock);
  const int status = lock_for(&held.lock, limit_ns);
  if (status != 0 && status != EOWNERDEAD) return false;
  held.holder.store(pid_, std::memory_order_relaxed);
  if (status == EOWNERDEAD) {
    const uint64_t first = lock * BoxPlan::kChunksOfLock;
    const uint64_t end = std::min(first + BoxPlan::kChunksOfLock, plan_.chunks());
    for (uint64_t chunk = first; chunk < end; ++chunk) {
      // The published version of the dead holder is complete in its journal, which no process uses
      // before it is copied home.
      if (!BoxState(chunk_at(chunk).state.load(std::memory_order_relaxed)).is_home()) {
        bring_home(chunk, 0, values_in(chunk), Store::kOrdinary);
      }
    }
    header().recoveries.fetch_add(1, std::memory_order_relaxed);
    HSGD_CHECK(::pthread_mutex_consistent(&held.lock) == 0);
  }
  return true;
}

bool BoxChunks::try_lock(uint64_t lock) const { return take_lock(lock, 0); }

void BoxChunks::lock(uint64_t lock, const Deadline& deadline) const {
  while (!take_lock(lock, kSliceNs)) check_lock(lock, deadline);
}

void BoxChunks::unlock(uint64_t lock) const { ::pthread_mutex_unlock(&lock_at(lock).lock); }

void BoxChunks::check_lock(uint64_t lock, const Deadline& deadline) const {
  const uint64_t first = lock * BoxPlan::kChunksOfLock;
  const uint64_t end = std::min(first + BoxPlan::kChunksOfLock, plan_.chunks());
  check(deadline, lock_at(lock).holder,
        text("chunks %llu to %llu", static_cast<unsigned long long>(first),
             static_cast<unsigned long long>(end - 1)));
}

// Checks the deadline between two slices of a wait.
void BoxChunks::check(const Deadline& deadline, const std::atomic<int32_t>& holder,
                      const std::string& what) const {
  if (deadline.interrupted()) throw_error(HSGD_ERR_INTERRUPTED, -1, "ParameterBox: interrupted");
  if (!deadline.passed()) return;
  const int32_t who = holder.load(std::memory_order_relaxed);
  throw_error(HSGD_ERR_TIMEOUT, -1,
              "ParameterBox: pid %d waits for %s of the box \"%s\", which %spid %d has held for "
              "%g s; it is stopped or gets no CPU time; resume or kill it",
              pid_, what.c_str(), header().key, who == pid_ ? "another thread of " : "", who,
              deadline.timeout_s());
}

// --- journals ---

uint32_t BoxChunks::claim_journal(uint64_t place, const Deadline& deadline) const {
  const uint32_t journals = plan_.journals();
  const auto own = static_cast<uint32_t>(place % journals);
  for (;;) {
    for (uint32_t i = 0; i < journals; ++i) {
      const uint32_t journal = (own + i) % journals;
      if (take_journal(journal, 0)) return journal;
    }
    if (take_journal(own, kSliceNs)) return own;
    check_journal(own, deadline);
  }
}

void BoxChunks::check_journal(uint32_t journal, const Deadline& deadline) const {
  const BoxJournal& wanted = journal_at(journal);
  std::string what = text("journal %u (all are taken)", journal);
  const uint64_t chunk = wanted.chunk.load(std::memory_order_relaxed);
  if (chunk == BoxJournal::kNone) return check(deadline, wanted.holder, what);
  // Its holder may be dead: then the holder of the chunk's lock keeps it.
  what += text(" with its change of chunk %llu", static_cast<unsigned long long>(chunk));
  check(deadline, lock_at(chunk / BoxPlan::kChunksOfLock).holder, what);
}

// Returns false also if the journal still holds a dead holder's published version that another
// process is copying home.
bool BoxChunks::take_journal(uint32_t journal, int64_t limit_ns) const {
  BoxJournal& held = journal_at(journal);
  const int status = lock_for(&held.lock, limit_ns);
  if (status != 0 && status != EOWNERDEAD) return false;
  if (status == EOWNERDEAD) HSGD_CHECK(::pthread_mutex_consistent(&held.lock) == 0);
  held.holder.store(pid_, std::memory_order_relaxed);
  const uint64_t chunk = held.chunk.load(std::memory_order_relaxed);
  if (chunk != BoxJournal::kNone) {
    const uint64_t lock = chunk / BoxPlan::kChunksOfLock;
    if (!take_lock(lock, limit_ns)) {
      return_journal(journal);
      return false;
    }
    unlock(lock);
    held.chunk.store(BoxJournal::kNone, std::memory_order_relaxed);
  }
  return true;
}

void BoxChunks::return_journal(uint32_t journal) const {
  ::pthread_mutex_unlock(&journal_at(journal).lock);
}

// --- versions ---

BoxChunks::Draft BoxChunks::begin(const Part& part, uint32_t journal) const {
  const float* old = home_of(part.chunk);
  float* next = draft_in(journal);
  // Partner: try_read(). Forbids that a reader of this journal's previous version sees a value of
  // the next one without seeing that the previous one has gone home.
  fence_before_copy(values_in(part.chunk), Store::kOrdinary);
  const uint64_t end = part.begin + part.count;
  const uint64_t rest = values_in(part.chunk) - end;
  if (part.begin > 0) copy_(next, old, part.begin * sizeof(float), Store::kOrdinary);
  if (rest > 0) copy_(next + end, old + end, rest * sizeof(float), Store::kOrdinary);
  return {old + part.begin, next + part.begin};
}

void BoxChunks::publish(const Part& part, uint32_t journal, Store store) const {
  BoxChunk& held = chunk_at(part.chunk);
  HSGD_FAULT_POINT("box: chunk made, not told");
  journal_at(journal).chunk.store(part.chunk, std::memory_order_relaxed);
  const BoxState state(held.state.load(std::memory_order_relaxed));
  // Partner: try_read(). Forbids that a reader sees the state before the values in the journal, and
  // that the next holder after a death sees it before the journal's chunk.
  held.state.store(state.next_in(journal).word(), std::memory_order_release);
  HSGD_FAULT_POINT("box: chunk told");
  bring_home(part.chunk, part.begin, part.count, store);
  journal_at(journal).chunk.store(BoxJournal::kNone, std::memory_order_relaxed);
  HSGD_FAULT_POINT("box: chunk home");
}

// Copies the published version of a chunk from the journal to its place in the box. If the holder
// of the lock dies meanwhile, the next holder may start over: the journal stays unchanged.
void BoxChunks::bring_home(uint64_t chunk, uint64_t begin, uint64_t count, Store store) const {
  BoxChunk& held = chunk_at(chunk);
  const BoxState state(held.state.load(std::memory_order_relaxed));
  const float* draft = draft_in(state.journal()) + begin;
  float* home = home_of(chunk) + begin;
  // Partner: try_read(). Forbids that a reader sees a value of this version at home without seeing
  // that the previous version has ended.
  fence_before_copy(count, store);
  const uint64_t half = count / 2;
  copy_(home, draft, half * sizeof(float), store);
  HSGD_FAULT_POINT("box: chunk half home");
  copy_(home + half, draft + half, (count - half) * sizeof(float), store);
  // Partner: try_read(). Forbids that a reader sees the state before the values; streamed ones were
  // fenced by the kernel.
  held.state.store(state.at_home().word(), std::memory_order_release);
}

// --- reading ---

bool BoxChunks::try_read(const Part& part, float* out) const {
  const BoxChunk& wanted = chunk_at(part.chunk);
  const BoxState state(wanted.state.load(std::memory_order_acquire));
  const float* from = state.is_home() ? home_of(part.chunk) : draft_in(state.journal());
  copy_(out, from + part.begin, part.count * sizeof(float), Store::kOrdinary);
  // Partners: begin() and bring_home(). A reader that saw a value written over this version sees
  // here that the state has changed.
  std::atomic_thread_fence(std::memory_order_acquire);
  return wanted.state.load(std::memory_order_relaxed) == state.word();
}

void BoxChunks::read(const Part& part, float* out, const Deadline& deadline) const {
  for (int tries = 1; !try_read(part, out); ++tries) {
    if (tries < kTries) continue;
    const uint64_t lock = part.chunk / BoxPlan::kChunksOfLock;
    if (take_lock(lock, kSliceNs)) {
      HSGD_CHECK(try_read(part, out));  // no process changes it now
      unlock(lock);
      return;
    }
    check_lock(lock, deadline);
  }
}

}  // namespace hsgd
