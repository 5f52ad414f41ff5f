// Chunk by chunk: reading without a lock, changing under one.
#include "box.hpp"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "error.hpp"
#include "fault.hpp"

namespace hsgd {
namespace {

// A reader that was overtaken so often takes the lock.
constexpr int kTries = 16;
// Larger boxes do not stay in a cache until they are read: then ordinary stores first read what
// they overwrite.
constexpr size_t kStreamFrom = 8 << 20;
constexpr int64_t kSliceNs = 20'000'000;  // of a wait for a lock, between two looks around

unsigned long long number(uint64_t value) { return value; }

void init_lock(pthread_mutex_t* lock) {
  pthread_mutexattr_t kind;
  ::pthread_mutexattr_init(&kind);
  ::pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  const int status = ::pthread_mutex_init(lock, &kind);
  ::pthread_mutexattr_destroy(&kind);
  if (status != 0) {
    throw Error(HSGD_ERR_SYSTEM, -1,
                text("ParameterBox: making a lock: %s", std::strerror(status)));
  }
}

// 0, EOWNERDEAD or ETIMEDOUT. By the clock that is never set.
int lock_for(pthread_mutex_t* lock, int64_t limit_ns) {
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t end_ns = until.tv_nsec + limit_ns;
  until.tv_sec += end_ns / 1'000'000'000;
  until.tv_nsec = end_ns % 1'000'000'000;
  return ::pthread_mutex_clocklock(lock, CLOCK_MONOTONIC, &until);
}

}  // namespace

// --- making and finding ---

std::unique_ptr<Box> Box::create(const std::string& key, const BoxPlan& plan,
                                 const float* initial) {
  Fd door = claim_box_key(key);
  Segment segment = Segment::create(plan.segment_bytes(), 1,
                                    "a box takes twice the bytes of its values; ask for less");
  std::byte* base = segment.data();
  auto* header = new (base) BoxHeader{};
  header->magic = kBoxMagic;
  header->version = kBoxVersion;
  header->chunk_struct_bytes = sizeof(BoxChunk);
  header->counters = plan.counters;
  header->count = plan.count;
  header->chunk_count = plan.chunk_count;
  std::memcpy(header->key, key.data(), key.size());
  for (uint64_t i = 0; i < plan.chunks(); ++i) {
    init_lock(&(new (base + plan.chunk_offset(i)) BoxChunk{})->lock);
  }
  for (uint32_t i = 0; i < plan.counters; ++i) new (base + plan.counter_offset(i)) BoxCounter{};
  if (initial != nullptr) {
    std::memcpy(base + plan.place_offset(0), initial, plan.count * sizeof(float));
  }
  // Nobody is answered before all of this is done.
  return std::unique_ptr<Box>(new Box(std::move(segment), std::move(door), plan));
}

std::unique_ptr<Box> Box::attach(const std::string& key, const Deadline& deadline) {
  BoxHandover given = ask_for_box(key, deadline);
  Segment segment = Segment::attach(std::move(given.segment), given.bytes);
  const auto& header = *reinterpret_cast<const BoxHeader*>(segment.data());
  const BoxPlan plan{header.count, header.chunk_count, header.counters};
  if (header.magic != kBoxMagic || header.version != kBoxVersion ||
      header.chunk_struct_bytes != sizeof(BoxChunk) || plan.segment_bytes() != given.bytes) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "ParameterBox: the box was made by another version of hsgd or of the C library; "
                "install the same one");
  }
  return std::unique_ptr<Box>(new Box(std::move(segment), std::move(given.door), plan));
}

Box::Box(Segment segment, Fd door, const BoxPlan& plan)
    : plan_(plan),
      segment_(std::move(segment)),
      place_(header().holders.fetch_add(1, std::memory_order_relaxed)),
      store_(plan.place_bytes() >= kStreamFrom ? Store::kNonTemporal : Store::kOrdinary),
      copy_(select_copy(detect_isa())),
      sum_(select_reduce(HSGD_FLOAT32, HSGD_SUM, detect_isa())),
      widen_(select_conversion(HSGD_BFLOAT16, detect_isa()).widen),
      elastic_(choose_elastic()),
      door_({Fd::duplicate(segment_.fd()), std::move(door), segment_.bytes()}) {
  segment_.forget_file();
}

uint64_t Box::version() const { return header().changes.load(std::memory_order_acquire); }

uint64_t Box::recoveries() const { return header().recoveries.load(std::memory_order_relaxed); }

void Box::check_mine() const {
  if (is_mine()) return;
  throw Error(HSGD_ERR_CLOSED, -1,
              "this ParameterBox belongs to the process that opened it; a forked child attaches by "
              "the key");
}

void Box::check_range(const char* what, uint64_t offset, uint64_t count) const {
  check_mine();
  if (offset <= plan_.count && count <= plan_.count - offset) return;
  throw Error(HSGD_ERR_ARGUMENT, -1,
              text("%s: %llu values from place %llu do not fit in the box \"%s\", which has %llu",
                   what, number(count), number(offset), header().key, number(plan_.count)));
}

// --- locks ---

bool Box::took(uint64_t index, int status) const {
  BoxChunk& held = chunk(index);
  if (status == EOWNERDEAD) {
    // What the dead holder published is whole, and what it did not is made anew.
    HSGD_CHECK(::pthread_mutex_consistent(&held.lock) == 0);
    header().recoveries.fetch_add(1, std::memory_order_relaxed);
    status = 0;
  }
  if (status != 0) return false;
  held.holder.store(::getpid(), std::memory_order_relaxed);
  return true;
}

bool Box::try_lock(uint64_t index) const {
  return took(index, ::pthread_mutex_trylock(&chunk(index).lock));
}

void Box::lock(uint64_t index, const Deadline& deadline) const {
  BoxChunk& wanted = chunk(index);
  while (!took(index, lock_for(&wanted.lock, kSliceNs))) {
    if (deadline.interrupted()) {
      throw Error(HSGD_ERR_INTERRUPTED, -1, "ParameterBox: interrupted");
    }
    if (deadline.passed()) {
      throw Error(HSGD_ERR_TIMEOUT, -1,
                  text("ParameterBox: pid %d has held chunk %llu of the box \"%s\" for %g s; it is "
                       "stopped or starved; continue or kill it",
                       wanted.holder.load(std::memory_order_relaxed), number(index), header().key,
                       deadline.timeout_s()));
    }
  }
}

// --- chunks ---

uint64_t Box::values_in(uint64_t index) const {
  return std::min(plan_.chunk_count, plan_.count - index * plan_.chunk_count);
}

Box::Part Box::part_of(uint64_t index, uint64_t offset, uint64_t count) const {
  const uint64_t start = index * plan_.chunk_count;
  const uint64_t begin = std::max(start, offset);
  const uint64_t end = std::min(start + values_in(index), offset + count);
  return {index, begin - start, end - begin, begin - offset};
}

// Calls work(part) for all chunks of the range, holding each: first those that are free, from a
// place of this holder's own on, so that several writers do not queue behind one another.
template <class Work>
void Box::change(uint64_t offset, uint64_t count, const Deadline& deadline, Work&& work) {
  if (count == 0) return;
  struct Unlock {
    pthread_mutex_t* lock;
    ~Unlock() { ::pthread_mutex_unlock(lock); }
  };
  const auto work_on = [&](uint64_t index) {
    const Unlock unlock{&chunk(index).lock};
    HSGD_FAULT_POINT("box: holds a chunk");
    work(part_of(index, offset, count));
  };
  const uint64_t first = offset / plan_.chunk_count;
  const uint64_t chunks = (offset + count - 1) / plan_.chunk_count - first + 1;
  const uint64_t spread = std::max<uint64_t>(1, chunks * 5 / 8);  // neighbours start far apart
  const uint64_t start = place_ * spread % chunks;
  std::vector<uint64_t> busy;
  for (uint64_t i = 0; i < chunks; ++i) {
    const uint64_t index = first + (start + i) % chunks;
    if (try_lock(index)) {
      work_on(index);
    } else {
      busy.push_back(index);
    }
  }
  for (const uint64_t index : busy) {
    lock(index, deadline);
    work_on(index);
  }
}

// Makes and publishes the next version of a chunk that is held: make(old, next) fills the part.
template <class Make>
void Box::renew(const Part& part, Make&& make) {
  BoxChunk& held = chunk(part.chunk);
  const uint64_t version = held.version.load(std::memory_order_relaxed);
  float* old = values(part.chunk, version);
  float* next = values(part.chunk, version + 1);
  held.unfinished.store(version + 1, std::memory_order_relaxed);
  // Partner: read_part(). Forbids that a reader sees a value of the next version and not that it is
  // being made. Stronger than release, which lets streamed values pass.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const uint64_t end = part.begin + part.count;
  const uint64_t rest = values_in(part.chunk) - end;
  if (part.begin > 0) copy_(next, old, part.begin * sizeof(float), Store::kOrdinary);
  if (rest > 0) copy_(next + end, old + end, rest * sizeof(float), Store::kOrdinary);
  make(old + part.begin, next + part.begin);
  HSGD_FAULT_POINT("box: chunk made, not told");
  // Partner: read_part(). Forbids that a reader sees the version before its values; streamed ones
  // were fenced by the kernel.
  held.version.store(version + 1, std::memory_order_release);
  HSGD_FAULT_POINT("box: chunk told");
}

void Box::read_part(const Part& part, float* out, const Deadline& deadline) const {
  const BoxChunk& wanted = chunk(part.chunk);
  const size_t bytes = part.count * sizeof(float);
  for (int tries = 0; tries < kTries; ++tries) {
    const uint64_t version = wanted.version.load(std::memory_order_acquire);
    copy_(out, values(part.chunk, version) + part.begin, bytes, Store::kOrdinary);
    // Partner: renew(). This place is overwritten by the version after the next, and whoever saw a
    // value of that one sees here that it is being made.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (wanted.unfinished.load(std::memory_order_relaxed) < version + 2) return;
  }
  lock(part.chunk, deadline);
  const uint64_t version = wanted.version.load(std::memory_order_relaxed);
  copy_(out, values(part.chunk, version) + part.begin, bytes, Store::kOrdinary);
  ::pthread_mutex_unlock(&chunk(part.chunk).lock);
}

uint64_t Box::finish_change(bool finishes) {
  if (!finishes) return version();
  // Release: who sees the number sees the versions of the chunks; partner: version().
  return header().changes.fetch_add(1, std::memory_order_acq_rel) + 1;
}

// --- what holders do ---

void Box::read(float* out, uint64_t offset, uint64_t count, const Deadline& deadline) const {
  check_range("read", offset, count);
  if (count == 0) return;
  const uint64_t last = (offset + count - 1) / plan_.chunk_count;
  for (uint64_t index = offset / plan_.chunk_count; index <= last; ++index) {
    const Part part = part_of(index, offset, count);
    read_part(part, out + part.at, deadline);
  }
}

uint64_t Box::write(const float* values, uint64_t offset, uint64_t count, bool finishes,
                    const Deadline& deadline) {
  check_range("write", offset, count);
  change(offset, count, deadline, [&](const Part& part) {
    renew(part, [&](const float*, float* next) {
      copy_(next, values + part.at, part.count * sizeof(float), store_);
    });
  });
  return finish_change(finishes);
}

void Box::take_copy(const float* values, uint64_t offset, uint64_t count, uint64_t stamp,
                    uint64_t version, const Deadline& deadline) {
  check_range("take_copy", offset, count);
  change(offset, count, deadline, [&](const Part& part) {
    std::atomic<uint64_t>& last = chunk(part.chunk).stamp;
    if (last.load(std::memory_order_relaxed) >= stamp) return;
    renew(part, [&](const float*, float* next) {
      copy_(next, values + part.at, part.count * sizeof(float), store_);
    });
    last.store(stamp, std::memory_order_relaxed);
  });
  // Grows only: several ranks of the node take copies.
  uint64_t known = header().changes.load(std::memory_order_relaxed);
  while (known < version &&
         !header().changes.compare_exchange_weak(known, version, std::memory_order_acq_rel)) {
  }
}

uint64_t Box::accumulate(const void* delta, hsgd_dtype dtype, uint64_t offset, uint64_t count,
                         bool finishes, const Deadline& deadline) {
  check_range("accumulate", offset, count);
  if (dtype != HSGD_FLOAT32 && dtype != HSGD_BFLOAT16) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("accumulate: dtype %s; give float32 or bfloat16", hsgd_dtype_name(dtype)));
  }
  const bool narrow = dtype == HSGD_BFLOAT16;
  std::vector<float> wide(narrow ? std::min(count, plan_.chunk_count) : 0);
  change(offset, count, deadline, [&](const Part& part) {
    const float* added = static_cast<const float*>(delta) + part.at;
    if (narrow) {
      widen_(wide.data(), static_cast<const uint16_t*>(delta) + part.at, part.count);
      added = wide.data();
    }
    renew(part, [&](const float* old, float* next) {
      const void* inputs[2] = {old, added};
      sum_({inputs, 2, next, nullptr, part.count, 1.0, store_, Store::kOrdinary});
    });
  });
  return finish_change(finishes);
}

// The part of each tensor that lies in a part of a chunk.
double Box::mix(const std::vector<Tensor>& weights, const std::vector<uint64_t>& starts,
                const Part& part, ElasticArgs args, void* delta, hsgd_dtype dtype) const {
  const float* centre = args.centre;
  float* next = args.next;
  double squares = 0;
  auto tensor = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), part.at) -
                                    starts.begin() - 1);
  for (uint64_t done = 0; done < part.count; ++tensor) {
    const uint64_t at = part.at + done;
    const uint64_t within = at - starts[tensor];
    args.count = std::min(part.count - done, weights[tensor].count - within);
    if (args.count == 0) continue;
    args.weights = weights[tensor].data + within;
    args.centre = centre + done;
    args.next = next == nullptr ? nullptr : next + done;
    const bool narrow = dtype == HSGD_BFLOAT16;
    if (delta != nullptr && narrow) args.narrow = static_cast<uint16_t*>(delta) + at;
    if (delta != nullptr && !narrow) args.delta = static_cast<float*>(delta) + at;
    squares += elastic_(args);
    done += args.count;
  }
  return squares;
}

double Box::elastic(const std::vector<Tensor>& weights, float rate, void* delta, hsgd_dtype dtype,
                    const Deadline& deadline) {
  std::vector<uint64_t> starts;
  uint64_t count = 0;
  for (const Tensor& tensor : weights) {
    starts.push_back(count);
    count += tensor.count;
  }
  check_range("elastic", 0, count);
  if (delta != nullptr && dtype != HSGD_FLOAT32 && dtype != HSGD_BFLOAT16) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("elastic: dtype %s; give float32 or bfloat16", hsgd_dtype_name(dtype)));
  }
  double squares = 0;
  ElasticArgs args{};
  args.rate = rate;
  if (delta == nullptr) {
    change(0, count, deadline, [&](const Part& part) {
      renew(part, [&](const float* old, float* next) {
        args.centre = old;
        args.next = next;
        squares += mix(weights, starts, part, args, nullptr, dtype);
      });
    });
    finish_change(true);
    return squares;
  }
  // A copy that stays in the cache, so that weights are moved by values that were not torn.
  std::vector<float> centre(std::min(count, plan_.chunk_count));
  args.centre = centre.data();
  for (uint64_t index = 0; index * plan_.chunk_count < count; ++index) {
    const Part part = part_of(index, 0, count);
    read_part(part, centre.data(), deadline);
    squares += mix(weights, starts, part, args, delta, dtype);
  }
  return squares;
}

int64_t Box::fetch_add(uint32_t counter, int64_t value) {
  check_mine();
  if (counter >= plan_.counters) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("fetch_add: counter %u: the box \"%s\" has %u, numbered from 0", counter,
                     header().key, plan_.counters));
  }
  auto& cell = *reinterpret_cast<BoxCounter*>(segment_.data() + plan_.counter_offset(counter));
  // Acquire and release, so that a counter may tell of values that were written before.
  return cell.value.fetch_add(value, std::memory_order_acq_rel);
}

}  // namespace hsgd
