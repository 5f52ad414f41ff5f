// When the other kind of store is tried, and when it is taken.
#include "collectives/store_tuner.hpp"

#include <algorithm>

namespace hsgd {
namespace {

constexpr double kClearly = 0.85;    // the other kind must win by this much: noise shall not decide
constexpr double kSurprising = 1.5;  // times what is usual: the machine may have changed
// The first collective of a trial finds the lines as the other kind of store has left them, and is
// as slow as that.
constexpr int kTrial = 2;
// A trial that is lost doubles the time to the next: four to one costs 1.5 % at 512.
constexpr int kLeastInterval = 16;
constexpr int kMostInterval = 512;
constexpr double kInertia = 0.875;  // of what is usual

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
  settled_ = recent_;  // whatever it is that has changed, this store is still the better one
  interval_ = std::min(2 * interval_, kMostInterval);
}

void StoreChoice::take(Store store, double cost) {
  taken_ = store;
  last_ = recent_ = settled_ = cost;
  interval_ = kLeastInterval;
}

StoreChoice* StoreChoices::of(Kind kind, size_t bytes) {
  size_t row = 0;
  switch (kind) {
    case Kind::kAllreduce:
      break;
    case Kind::kBroadcast:
      row = 1;
      break;
    case Kind::kReduceScatter:
      row = 2;
      break;
    case Kind::kAllgather:
      row = 3;
      break;
    default:
      return nullptr;
  }
  size_t column = 0;
  for (size_t limit = 4 * kLeastBytes; bytes >= limit && column + 1 < kSizes; limit *= 4) ++column;
  return &choices_[row * kSizes + column];
}

}  // namespace hsgd
