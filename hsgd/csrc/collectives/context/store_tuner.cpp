// StoreTuner: decides when to try the other kind of store and when to use it.
#include "collectives/context/store_tuner.hpp"

#include <algorithm>

namespace hsgd {
namespace {

constexpr double kClearly = 0.85;    // the other kind must win by this much, against noise
constexpr double kSurprising = 1.5;  // times what is usual: the machine may have changed
// The first collective of a trial is as slow as the old kind, because it finds the lines as the old
// kind left them.
constexpr int kTrial = 2;
// A lost trial doubles the time to the next one: a loss of four to one costs 1.5 % at 512.
constexpr int kLeastInterval = 16;
constexpr int kMostInterval = 512;
constexpr double kInertia = 0.875;  // weight of the usual cost

}  // namespace

void StoreChoice::learn(double cost) {
  if (trials_left_ > 0) {
    if (--trials_left_ == 0) judge_trial(cost);
    return;
  }
  recent_ = last_ > 0.0 ? std::min(last_, cost) : cost;
  last_ = cost;
  const bool surprise = settled_ > 0.0 && recent_ > kSurprising * settled_;
  settled_ = settled_ > 0.0 ? kInertia * settled_ + (1.0 - kInertia) * recent_ : recent_;
  if (surprise || ++since_trial_ >= interval_) trials_left_ = kTrial;
  if (surprise) interval_ = kLeastInterval;
}

void StoreChoice::judge_trial(double cost) {
  since_trial_ = 0;
  if (cost < kClearly * recent_) return take(other(), cost);
  settled_ = recent_;  // something changed, but this store is still the better one
  interval_ = std::min(2 * interval_, kMostInterval);
}

void StoreChoice::take(Store store, double cost) {
  taken_ = store;
  last_ = recent_ = settled_ = cost;
  interval_ = kLeastInterval;
}

StoreChoice* StoreChoices::of(hsgd_kind kind, size_t bytes) {
  if (bytes <= kComparedBytes) return nullptr;
  size_t row = 0;
  switch (kind) {
    case HSGD_ALLREDUCE:
      break;
    case HSGD_BROADCAST:
      row = 1;
      break;
    case HSGD_REDUCE_SCATTER:
      row = 2;
      break;
    case HSGD_ALLGATHER:
      row = 3;
      break;
    default:
      return nullptr;
  }
  size_t column = 0;
  for (size_t limit = 4 * kLeastBytes; bytes >= limit && column + 1 < kSizes; limit *= 4) ++column;
  return &choices_[row * kSizes + column];
}

Store StoreTuner::into_ring(const Operation& operation) {
  StoreChoice* choice =
      learns_ ? choices_.of(operation.signature.kind(), operation.bytes()) : nullptr;
  if (choice == nullptr) return usual_;
  staged_ = {choice, operation.bytes(), 0};
  return choice->next();
}

void StoreTuner::end(uint64_t ticks) {
  if (staged_.choice == nullptr) return;
  compared_ = staged_;
  compared_.ticks = ticks;
}

void StoreTuner::learn(uint64_t most_ticks) {
  compared_.choice->learn(static_cast<double>(most_ticks) / static_cast<double>(compared_.bytes));
  compared_ = {};
}

// Chooses ordinary or non-temporal stores for the output. Large results leave the caches before
// they are read, and ordinary stores would first load each line from memory. A sum in place has
// loaded the lines already. A broadcast leaves more of the cache for its results, since only the
// root's data is read: its threshold is larger (docs/internals/scale.md).
Store StoreTuner::into_output(const Operation& operation) const {
  constexpr size_t kStreamedBytes = 4 << 20;
  constexpr size_t kBroadcastBytes = 64 << 20;  // on all ranks together
  if (!streams_ || operation.out_bytes() < kStreamedBytes) return Store::kOrdinary;
  if (operation.root >= 0) {
    return operation.out_bytes() * ranks_ < kBroadcastBytes ? Store::kOrdinary
                                                            : Store::kNonTemporal;
  }
  const auto* in = static_cast<const std::byte*>(operation.in);
  const auto* out = static_cast<const std::byte*>(operation.out);
  const bool sums = operation.reduction.reduce != nullptr;
  const bool in_place = sums && out >= in && out < in + operation.bytes();
  return in_place ? Store::kOrdinary : Store::kNonTemporal;
}

}  // namespace hsgd
