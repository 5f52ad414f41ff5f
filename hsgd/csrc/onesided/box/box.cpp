// Box: changes and reads ranges, chunk by chunk.
#include "onesided/box/box.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// The size from which a box does not stay in a cache until it is read. Writes that need no old
// value then use streaming stores: ordinary ones would load the old line first.
constexpr size_t kStreamFrom = 8 << 20;

// Fetches the values from which the next chunk begins while a chunk is copied from cache to cache:
// the processor fetches ahead by itself only inside a page, which a chunk fills. An accumulate of
// 17 MB took 0.75 to 0.8 of the time.
void fetch_begin(const float* values) {
  constexpr size_t kBytes = 1 << 10;
  const auto* bytes = reinterpret_cast<const std::byte*>(values);
  for (size_t at = 0; at < kBytes; at += kLine) __builtin_prefetch(bytes + at);
}

unsigned long long number(uint64_t value) { return value; }

void check(const BoxPlan& plan) {
  constexpr uint64_t kMostValues = uint64_t{1} << 40;
  constexpr uint64_t kMostOfChunk = uint64_t{1} << 26;
  constexpr uint32_t kMostCounters = 1 << 20;
  if (plan.count > kMostValues) {
    throw_invalid("ParameterBox: %llu values are too many", number(plan.count));
  }
  if (plan.chunk_count < 1 || plan.chunk_count > kMostOfChunk) {
    throw_invalid("ParameterBox: chunks of %llu values; give 1 to %llu", number(plan.chunk_count),
                  number(kMostOfChunk));
  }
  if (plan.counters > kMostCounters) {
    throw_invalid("ParameterBox: %u counters; give up to %u", plan.counters, kMostCounters);
  }
}

}  // namespace

Deadline Box::patience(double timeout_s, Deadline::Interrupted interrupted) {
  if (!(timeout_s >= 0 && timeout_s <= 1e9)) {
    throw_invalid("ParameterBox: timeout_s is %g; give seconds from 0 to 1e9", timeout_s);
  }
  return Deadline(timeout_s, interrupted);
}

// creating and attaching

std::unique_ptr<Box> Box::create(const std::string& key, const BoxPlan& plan,
                                 const float* initial) {
  check(plan);
  Fd door = claim_box_key(key);
  Segment segment =
      Segment::create(plan.segment_bytes(),
                      "a box takes the bytes of its values and up to 64 chunks; ask for less");
  std::byte* base = segment.data();
  auto* header = new (base) BoxHeader{};
  header->magic = kBoxMagic;
  header->version = kBoxVersion;
  header->lock_struct_bytes = sizeof(BoxLock);
  header->counters = plan.counters;
  header->count = plan.count;
  header->chunk_count = plan.chunk_count;
  header->changes.store(first_count(), std::memory_order_relaxed);
  std::memcpy(header->key, key.data(), key.size());
  BoxChunks::prepare(base, plan);
  for (uint32_t i = 0; i < plan.counters; ++i) new (base + plan.counter_offset(i)) BoxCounter{};
  if (initial != nullptr) {
    std::memcpy(base + plan.values_offset(), initial, plan.count * sizeof(float));
  }
  // No other process gets an answer before all of this is done.
  return std::unique_ptr<Box>(new Box(std::move(segment), std::move(door), plan));
}

std::unique_ptr<Box> Box::attach(const std::string& key, const Deadline& deadline) {
  BoxHandover given = ask_for_box(key, deadline);
  Segment segment = Segment::attach(std::move(given.segment), given.bytes);
  const auto& header = *reinterpret_cast<const BoxHeader*>(segment.data());
  const BoxPlan plan{header.count, header.chunk_count, header.counters};
  if (header.magic != kBoxMagic || header.version != kBoxVersion ||
      header.lock_struct_bytes != sizeof(BoxLock) || plan.segment_bytes() != given.bytes) {
    throw_invalid(
        "ParameterBox: the box was made by another version of hsgd or of the C library; "
        "install the same one");
  }
  return std::unique_ptr<Box>(new Box(std::move(segment), std::move(given.door), plan));
}

Box::~Box() = default;

Box::Box(Segment segment, Fd door, const BoxPlan& plan)
    : plan_(plan),
      segment_(std::move(segment)),
      place_(header().holders.fetch_add(1, std::memory_order_relaxed)),
      store_(plan.value_bytes() >= kStreamFrom ? Store::kNonTemporal : Store::kOrdinary),
      chunks_(segment_.data(), plan),
      copy_(select_copy(detect_isa())),
      add_(choose_add()),
      widen_(select_conversion(HSGD_BFLOAT16, detect_isa()).widen),
      elastic_(choose_elastic()),
      door_({Fd::duplicate(segment_.fd()), std::move(door), segment_.bytes()}) {
  segment_.forget_file();
}

uint64_t Box::version() const { return header().changes.load(std::memory_order_acquire); }

uint64_t Box::recoveries() const { return header().recoveries.load(std::memory_order_relaxed); }

void Box::check_mine() const {
  if (is_mine()) return;
  throw_error(HSGD_ERR_CLOSED, -1,
              "this ParameterBox belongs to the process that opened it; a forked child attaches by "
              "the key");
}

void Box::check_range(const char* what, uint64_t offset, uint64_t count) const {
  check_mine();
  if (offset <= plan_.count && count <= plan_.count - offset) return;
  throw_invalid("%s: %llu values from place %llu do not fit in the box \"%s\", which has %llu",
                what, number(count), number(offset), header().key, number(plan_.count));
}

// Calls work(part, journal) for all chunks of the range, holding each: first the free ones,
// starting at a different place for each holder, so that several writers do not queue behind one
// another.
template <class Work>
void Box::change(uint64_t offset, uint64_t count, const Deadline& deadline, Work&& work) {
  if (count == 0) return;
  struct Unlock {
    const BoxChunks& chunks;
    uint64_t lock;
    ~Unlock() { chunks.unlock(lock); }
  };
  struct Journal {
    const BoxChunks& chunks;
    uint32_t number;
    ~Journal() { chunks.return_journal(number); }
  };
  const Journal journal{chunks_, chunks_.claim_journal(place_, deadline)};
  HSGD_FAULT_POINT("box: holds a journal");
  const uint64_t first = offset / plan_.chunk_count;
  const uint64_t end = (offset + count - 1) / plan_.chunk_count + 1;
  const auto work_on = [&](uint64_t lock) {
    const Unlock unlock{chunks_, lock};
    HSGD_FAULT_POINT("box: holds a lock");
    const uint64_t begin = lock * BoxPlan::kChunksOfLock;
    const uint64_t stop = std::min(begin + BoxPlan::kChunksOfLock, end);
    for (uint64_t chunk = std::max(begin, first); chunk < stop; ++chunk) {
      work(chunks_.part_of(chunk, offset, count), journal.number);
    }
  };
  const uint64_t first_lock = first / BoxPlan::kChunksOfLock;
  const uint64_t locks = (end - 1) / BoxPlan::kChunksOfLock - first_lock + 1;
  // Consecutive holders start far apart.
  const uint64_t spread = std::max<uint64_t>(1, locks * 5 / 8);
  const uint64_t start = place_ * spread % locks;
  std::vector<uint64_t> busy;
  for (uint64_t i = 0; i < locks; ++i) {
    const uint64_t lock = first_lock + (start + i) % locks;
    if (chunks_.try_lock(lock)) {
      work_on(lock);
    } else {
      busy.push_back(lock);
    }
  }
  for (const uint64_t lock : busy) {
    chunks_.lock(lock, deadline);
    work_on(lock);
  }
}

// Replaces the part of a locked chunk by `values`.
void Box::replace(const Part& part, uint32_t journal, const float* values) {
  const BoxChunks::Draft draft = chunks_.begin(part, journal);
  copy_(draft.next, values, part.count * sizeof(float), Store::kOrdinary);
  chunks_.publish(part, journal, store_);
}

uint64_t Box::finish_change(bool finishes) {
  if (!finishes) return version();
  // Release: a reader of the number also sees the versions of the chunks; partner: version().
  return header().changes.fetch_add(1, std::memory_order_acq_rel) + 1;
}

// reads and changes of values

void Box::read(float* out, uint64_t offset, uint64_t count, const Deadline& deadline) const {
  check_range("read", offset, count);
  if (count == 0) return;
  const uint64_t last = (offset + count - 1) / plan_.chunk_count;
  for (uint64_t index = offset / plan_.chunk_count; index <= last; ++index) {
    const Part part = chunks_.part_of(index, offset, count);
    chunks_.read(part, out + part.at, deadline);
  }
}

uint64_t Box::write(const float* values, uint64_t offset, uint64_t count, bool finishes,
                    const Deadline& deadline) {
  check_range("write", offset, count);
  change(offset, count, deadline,
         [&](const Part& part, uint32_t journal) { replace(part, journal, values + part.at); });
  return finish_change(finishes);
}

void Box::take_copy(const float* values, uint64_t offset, uint64_t count, uint64_t stamp,
                    uint64_t version, const Deadline& deadline) {
  check_range("take_copy", offset, count);
  change(offset, count, deadline, [&](const Part& part, uint32_t journal) {
    std::atomic<uint64_t>& last = chunks_.stamp(part.chunk);
    if (last.load(std::memory_order_relaxed) >= stamp) return;
    replace(part, journal, values + part.at);
    last.store(stamp, std::memory_order_relaxed);
  });
  // The number only grows: several ranks of the node store copies.
  uint64_t known = header().changes.load(std::memory_order_relaxed);
  while (known < version &&
         !header().changes.compare_exchange_weak(known, version, std::memory_order_acq_rel)) {
  }
}

uint64_t Box::accumulate(const void* delta, hsgd_dtype dtype, uint64_t offset, uint64_t count,
                         float* sums, bool finishes, const Deadline& deadline) {
  check_range("accumulate", offset, count);
  if (dtype != HSGD_FLOAT32 && dtype != HSGD_BFLOAT16) {
    throw_invalid("accumulate: dtype %s; give float32 or bfloat16", hsgd_dtype_name(dtype));
  }
  const bool narrow = dtype == HSGD_BFLOAT16;
  std::vector<float> wide(narrow ? std::min(count, plan_.chunk_count) : 0);
  change(offset, count, deadline, [&](const Part& part, uint32_t journal) {
    const float* added = static_cast<const float*>(delta) + part.at;
    if (narrow) {
      widen_(wide.data(), static_cast<const uint16_t*>(delta) + part.at, part.count);
      added = wide.data();
    }
    const BoxChunks::Draft draft = chunks_.begin(part, journal);
    add_(draft.old, added, part.count, draft.next, sums == nullptr ? nullptr : sums + part.at);
    fetch_begin(draft.old + part.count);
    if (!narrow) fetch_begin(added + part.count);
    chunks_.publish(part, journal, Store::kOrdinary);
  });
  return finish_change(finishes);
}

// Mixes the part of each tensor that lies in a part of a chunk.
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
    throw_invalid("elastic: dtype %s; give float32 or bfloat16", hsgd_dtype_name(dtype));
  }
  double squares = 0;
  ElasticArgs args{};
  args.rate = rate;
  if (delta == nullptr) {
    change(0, count, deadline, [&](const Part& part, uint32_t journal) {
      const BoxChunks::Draft draft = chunks_.begin(part, journal);
      args.centre = draft.old;
      args.next = draft.next;
      squares += mix(weights, starts, part, args, nullptr, dtype);
      chunks_.publish(part, journal, Store::kOrdinary);
    });
    finish_change(true);
    return squares;
  }
  // A copy of some chunks that stays in the cache, so that weights move by consistent values.
  const uint64_t most = BoxPlan::kChunksOfLock * plan_.chunk_count;
  std::vector<float> centre(std::min(count, most));
  args.centre = centre.data();
  for (uint64_t at = 0; at < count; at += most) {
    const uint64_t some = std::min(most, count - at);
    read(centre.data(), at, some, deadline);
    squares += mix(weights, starts, {at / plan_.chunk_count, 0, some, at}, args, delta, dtype);
  }
  return squares;
}

int64_t Box::fetch_add(uint32_t counter, int64_t value) {
  check_mine();
  if (counter >= plan_.counters) {
    throw_invalid("fetch_add: counter %u: the box \"%s\" has %u, numbered from 0", counter,
                  header().key, plan_.counters);
  }
  auto& cell = *reinterpret_cast<BoxCounter*>(segment_.data() + plan_.counter_offset(counter));
  // Acquire and release, so that a counter can publish values that were written before.
  return cell.value.fetch_add(value, std::memory_order_acq_rel);
}

}  // namespace hsgd
