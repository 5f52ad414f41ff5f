// Which kind of store is taken: learnt from costs alone, so it is tested with made-up ones.
#include "collectives/context/store_tuner.hpp"
#include "support/check.hpp"

namespace {

using hsgd::Store;
using hsgd::StoreChoice;

// Costs per byte on a machine in one state.
struct Machine {
  double ordinary;
  double nontemporal;
  double of(Store store) const { return store == Store::kOrdinary ? ordinary : nontemporal; }
};

constexpr Machine kSharedCache{0.4, 0.55};
constexpr Machine kNoSharedCache{1.8, 0.45};

// The share of `collectives` that went with ordinary stores.
double run(StoreChoice& choice, const Machine& machine, int collectives) {
  int ordinary = 0;
  Store before = choice.next();
  for (int i = 0; i < collectives; ++i) {
    const Store store = choice.next();
    ordinary += store == Store::kOrdinary;
    // The first one after a change finds the lines as the other kind has left them.
    choice.learn(machine.of(store == before ? store : before));
    before = store;
  }
  return static_cast<double>(ordinary) / collectives;
}

}  // namespace

TEST("the faster kind is kept, and the other tried ever more rarely") {
  StoreChoice choice(Store::kOrdinary);
  CHECK(run(choice, kSharedCache, 2000) > 0.98);
  CHECK(run(choice, kSharedCache, 10000) > 0.995);
}

TEST("when the machine changes, the other kind is taken within five collectives") {
  StoreChoice choice(Store::kOrdinary);
  run(choice, kSharedCache, 1000);
  run(choice, kNoSharedCache, 5);
  CHECK(choice.next() == Store::kNonTemporal);
  CHECK(run(choice, kNoSharedCache, 10000) < 0.01);
}

TEST("what was lost comes back when the machine does") {
  StoreChoice choice(Store::kNonTemporal);
  run(choice, kNoSharedCache, 5000);
  CHECK(choice.next() == Store::kNonTemporal);
  run(choice, kSharedCache, 1100);  // the longest time between two trials, twice
  CHECK(choice.next() == Store::kOrdinary);
}

TEST("one slow collective changes nothing, nor do two kinds that are equal") {
  StoreChoice choice(Store::kOrdinary);
  run(choice, kSharedCache, 100);
  for (int i = 0; i < 50; ++i) {
    choice.learn(40.0);
    CHECK(run(choice, kSharedCache, 7) > 0.7);
  }
  CHECK(choice.next() == Store::kOrdinary);
  StoreChoice equal(Store::kNonTemporal);
  CHECK(run(equal, {0.5, 0.5}, 5000) < 0.02);
}

TEST("each kind of collective and each size learns for itself, where ranks move the same bytes") {
  hsgd::StoreChoices choices(Store::kOrdinary);
  StoreChoice* small = choices.of(HSGD_ALLREDUCE, 64 << 10);
  StoreChoice* large = choices.of(HSGD_ALLREDUCE, size_t{1} << 40);
  CHECK(small != nullptr && large != nullptr && small != large);
  CHECK(choices.of(HSGD_ALLREDUCE, (256 << 10) - 1) == small);
  CHECK(choices.of(HSGD_BROADCAST, 64 << 10) != small);
  CHECK(choices.of(HSGD_ALLTOALL, 64 << 10) == nullptr);
  CHECK(choices.of(HSGD_ALLREDUCE, 4096) == nullptr);  // of which not all are timed
  run(*small, kSharedCache, 100);
  run(*small, kNoSharedCache, 100);
  CHECK(small->next() == Store::kNonTemporal);
  CHECK(choices.of(HSGD_ALLGATHER, 64 << 10)->next() == Store::kOrdinary);
}

TEST("a broadcast streams its result when those of all ranks leave the caches") {
  hsgd_options options;
  hsgd_options_default(&options);
  const auto store = [&](int ranks, size_t bytes) {
    hsgd::Operation operation;
    operation.root = 0;
    operation.count = bytes / sizeof(float);
    operation.reduction.element_bytes = sizeof(float);
    operation.signature =
        hsgd::Signature::pack(HSGD_BROADCAST, HSGD_FLOAT32, HSGD_SUM, 0, operation.count, 0);
    return hsgd::StoreTuner(options, true, ranks, Store::kOrdinary).into_output(operation);
  };
  CHECK(store(2, 16 << 20) == Store::kOrdinary);
  CHECK(store(2, 32 << 20) == Store::kNonTemporal);
  CHECK(store(16, 4 << 20) == Store::kNonTemporal);
  CHECK(store(16, 2 << 20) == Store::kOrdinary);
}
