// autotune(): times rounds of small and large allreduces.
#include "collectives/queue/autotune.hpp"

#include <algorithm>
#include <vector>

#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/one_shot.hpp"

namespace hsgd {
namespace {

// Number of set-up collectives. Nodes may measure different amounts or nothing, but must count
// alike: headers between nodes carry the sequence.
constexpr uint64_t kSetupCollectives = 4096;
static_assert(kSetupCollectives % kCells == 0);

Signature nothing() { return Signature::pack(HSGD_BARRIER, HSGD_UINT8, HSGD_SUM, 0, 0, 0); }

Operation allreduce_of(const Context& context, const void* in, void* out, uint64_t count,
                       hsgd_dtype dtype, hsgd_op op) {
  Operation operation;
  operation.signature = Signature::pack(HSGD_ALLREDUCE, dtype, op, 0, count, 0);
  operation.in = in;
  operation.out = out;
  operation.count = count;
  operation.reduction = {select_reduce(dtype, op, context.isa()), context.copy(),
                         hsgd_dtype_bytes(dtype), 1.0};
  return operation;
}

void meet_on_node(Context& context) {
  context.begin(nothing(), nullptr);
  Operation header;
  header.signature = nothing();
  context.open(header, nullptr, 0);
  context.wait_until([&] { return context.headers_open(); });
}

// Replaces each value by the highest on this node, so that all ranks decide alike.
void most_on_node(Context& context, std::vector<double>* values) {
  const Operation operation =
      allreduce_of(context, values->data(), values->data(), values->size(), HSGD_FLOAT64, HSGD_MAX);
  context.begin(nothing(), nullptr);
  run_one_shot_on_node(context, operation);
}

// Returns the seconds of one allreduce inside the node on the slowest rank, for each tuning.
std::vector<double> measure(Context& context, size_t bytes, const std::vector<Tuning>& tunings) {
  constexpr int kRounds = 5;
  constexpr int kSmallCalls = 8;  // short calls are measured together
  constexpr size_t kSmallBytes = 64 << 10;
  const uint64_t count = bytes / sizeof(float);
  const std::vector<float> in(count, 1.0f);
  std::vector<float> out(count);
  const Operation operation =
      allreduce_of(context, in.data(), out.data(), count, HSGD_FLOAT32, HSGD_SUM);
  const Tuning own = context.sizes().tuning();
  std::vector<double> best_s(tunings.size(), 1e9);
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < tunings.size(); ++i) {
      context.sizes().set_tuning(tunings[i]);
      meet_on_node(context);
      const int calls = bytes < kSmallBytes ? kSmallCalls : 1;
      const int64_t start = now_ns();
      for (int call = 0; call < calls; ++call) {
        context.begin(nothing(), nullptr);
        allreduce_on_node(context, operation);
      }
      best_s[i] = std::min(best_s[i], static_cast<double>(now_ns() - start) * 1e-9 / calls);
    }
  }
  context.sizes().set_tuning(own);
  most_on_node(context, &best_s);
  return best_s;
}

Tuning measured(Context& context) {
  Tuning tuning = context.sizes().tuning();
  hsgd_options options = context.options();
  if (options.known_store != 0) {
    tuning.store = options.known_store == 2 ? Store::kNonTemporal : Store::kOrdinary;
    return tuning;
  }
  if (!context.one_node()) {  // fixed: the same on all nodes
    options.oneshot_bytes = static_cast<int64_t>(tuning.oneshot_bytes);
    options.chunk_bytes = static_cast<int64_t>(tuning.chunk_bytes);
  }
  const int ranks = context.place().local_size;
  return choose_tuning(
      options, ranks, context.local().shares_cores(),
      [&](size_t bytes, const auto& tunings) { return measure(context, bytes, tunings); });
}

}  // namespace

void autotune(Context& context) {
  if (context.place().local_size > 1) {
    context.sizes().set_tuning(measured(context));
    // The jump to the users' first sequence must not skip a cell that a rank still reads.
    while (context.sequence() % kCells != 0) meet_on_node(context);
  }
  context.end_setup(kSetupCollectives);
}

}  // namespace hsgd
