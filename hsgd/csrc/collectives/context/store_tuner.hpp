// Which kind of store collectives use: into shared memory what is faster at present, learnt from
// the collectives that run anyway; into the output by its size.
//
// Owns the rule: when the other kind is tried, and when it is taken. Ordinary stores win while the
// cores share a last-level cache and lose by four to one where they do not, and that changes within
// a run: a hypervisor moves virtual cores, a scheduler unbound ranks (docs/performance.md). Never
// measures and never communicates: all ranks of a node feed it the same costs, and so come to the
// same choice. Only times depend on it, never results.
#ifndef HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_
#define HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_

#include <array>
#include <cstddef>

#include "collectives/context/operation.hpp"
#include "core/kernels/reduce.hpp"

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
  // nullptr: collectives of this kind are not compared, as their bytes differ between ranks, nor
  // are small ones, of which most go in one step, and not all are timed.
  StoreChoice* of(hsgd_kind kind, size_t bytes);

 private:
  static constexpr size_t kSizes = 8;  // a factor of four each, from kLeastBytes on
  static constexpr size_t kComparedBytes = 4096;
  static constexpr size_t kLeastBytes = 16 << 10;
  std::array<StoreChoice, 4 * kSizes> choices_;
};

// The stores of one communicator.
class StoreTuner {
 public:
  // `ranks`: of this node.
  StoreTuner(const hsgd_options& options, bool one_node, int ranks, Store first)
      : choices_(first),
        ranks_(static_cast<size_t>(ranks)),
        usual_(first),
        learns_(options.nontemporal == 2 && one_node),
        streams_(options.nontemporal != 0 && one_node) {}
  void start_with(Store first) {  // what the start-up measurement found
    usual_ = first;
    choices_ = StoreChoices(first);
  }
  Store usual() const { return usual_; }
  Store into_output(const Operation& operation) const;

  // --- one collective ---
  void begin() { staged_ = {}; }
  // For staging its input; what it costs will be compared, where that is possible.
  Store into_ring(const Operation& operation);
  void end(uint64_t ticks);  // that this rank worked
  // --- the next one, whose header tells the ranks of the node what the last one cost each ---
  uint64_t cost() const { return compared_.ticks; }
  bool compares() const { return compared_.choice != nullptr; }
  void learn(uint64_t most_ticks);  // of any rank

 private:
  struct Compared {
    StoreChoice* choice = nullptr;
    size_t bytes = 0;
    uint64_t ticks = 0;
  };
  StoreChoices choices_;
  size_t ranks_;
  Store usual_;
  bool learns_;
  bool streams_;
  Compared compared_;  // the last collective whose cost is compared, on all ranks the same
  Compared staged_;    // the one under way, if its cost will be
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_
