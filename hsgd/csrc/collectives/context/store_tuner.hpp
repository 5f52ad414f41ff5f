// StoreTuner: chooses ordinary or non-temporal stores.
//
// For shared memory it learns the faster kind from the collectives that run anyway; for the output
// it decides by size. Ordinary stores win if the cores share a last-level cache, and lose by four
// to one if not. That changes within a run: a hypervisor moves virtual cores, a scheduler moves
// unbound ranks (docs/performance.md). Never measures and never communicates: all ranks of a node
// pass in the same costs and so make the same choice. Only times depend on it, never results.
#ifndef HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_
#define HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_

#include <array>
#include <cstddef>

#include "collectives/context/operation.hpp"
#include "core/kernels/reduce.hpp"

namespace hsgd {

// The choice for collectives of one kind and of about one size.
class StoreChoice {
 public:
  StoreChoice() = default;
  explicit StoreChoice(Store store) : taken_(store) {}
  Store next() const { return trials_left_ > 0 ? other() : taken_; }
  // Learns the cost of the collective that used next(): per byte on the slowest rank, in any unit,
  // without the wait for others.
  void learn(double cost);

 private:
  Store other() const {
    return taken_ == Store::kOrdinary ? Store::kNonTemporal : Store::kOrdinary;
  }
  void judge_trial(double cost);
  void take(Store store, double cost);

  Store taken_ = Store::kOrdinary;
  int trials_left_ = 0;
  double last_ = 0.0;     // cost of the previous collective with the chosen store
  double recent_ = 0.0;   // the lower of the last two: one slow collective may be an accident
  double settled_ = 0.0;  // the usual cost; 0: not known yet
  int interval_ = 16;     // collectives between two trials
  int since_trial_ = 0;
};

// One choice for each kind and size.
class StoreChoices {
 public:
  explicit StoreChoices(Store first) { choices_.fill(StoreChoice(first)); }
  // Returns nullptr for collectives that are not compared: kinds whose bytes differ between ranks,
  // and small ones, because most take one step and not all are timed.
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
  void start_with(Store first) {  // after the start-up measurement
    usual_ = first;
    choices_ = StoreChoices(first);
  }
  Store usual() const { return usual_; }
  Store into_output(const Operation& operation) const;

  // --- one collective ---
  void begin() { staged_ = {}; }
  // Returns the store for staging the input. The cost will be compared, if that is possible.
  Store into_ring(const Operation& operation);
  void end(uint64_t ticks);  // `ticks`: time that this rank worked
  // --- the next one: its header tells the ranks of the node each rank's last cost ---
  uint64_t cost() const { return compared_.ticks; }
  bool compares() const { return compared_.choice != nullptr; }
  void learn(uint64_t most_ticks);  // the highest of all ranks

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
  Compared compared_;  // the last collective with a compared cost; the same on all ranks
  Compared staged_;    // the one in progress, if its cost will be compared
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_STORE_TUNER_HPP_
