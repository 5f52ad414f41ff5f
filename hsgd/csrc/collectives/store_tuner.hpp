// Which kind of store into shared memory is faster at present, learnt from the collectives that run
// anyway.
//
// Owns the rule: when the other kind is tried, and when it is taken. Ordinary stores win while the
// cores share a last-level cache and lose by four to one where they do not, and that changes within
// a run: a hypervisor moves virtual cores, a scheduler unbound ranks (docs/performance.md). Never
// measures and never communicates: all ranks of a node feed it the same costs, and so come to the
// same choice. Only times depend on it, never results.
#ifndef HSGD_COLLECTIVES_STORE_TUNER_HPP_
#define HSGD_COLLECTIVES_STORE_TUNER_HPP_

#include <array>
#include <cstddef>

#include "base/call_signature.hpp"
#include "kernels/reduce.hpp"

namespace hsgd {

// For collectives of one kind and about one size.
class StoreChoice {
 public:
  StoreChoice() = default;
  explicit StoreChoice(Store store) : taken_(store) {}
  Store next() const { return trials_left_ > 0 ? other() : taken_; }
  // What the collective that went as next() says took on the slowest rank, per byte, in any unit;
  // waiting for others excluded.
  void learn(double cost);

 private:
  Store other() const {
    return taken_ == Store::kOrdinary ? Store::kNonTemporal : Store::kOrdinary;
  }
  void judge_trial(double cost);
  void take(Store store, double cost);

  Store taken_ = Store::kOrdinary;
  int trials_left_ = 0;
  double last_ = 0.0;     // cost of the collective before, with the store taken
  double recent_ = 0.0;   // the lesser of two: one slow collective is an accident
  double settled_ = 0.0;  // what is usual; 0: not known yet
  int interval_ = 16;     // collectives between two trials
  int since_trial_ = 0;
};

// One choice for each kind and size.
class StoreChoices {
 public:
  explicit StoreChoices(Store first) { choices_.fill(StoreChoice(first)); }
  // nullptr: collectives of this kind are not compared, as their bytes differ between ranks.
  StoreChoice* of(Kind kind, size_t bytes);

 private:
  static constexpr size_t kSizes = 8;  // a factor of four each, from kLeastBytes on
  static constexpr size_t kLeastBytes = 16 << 10;
  std::array<StoreChoice, 4 * kSizes> choices_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_STORE_TUNER_HPP_
