// Communicator: keeps the order of collectives and handles errors.
#include "collectives/queue/communicator.hpp"

#include "collectives/kinds/collectives.hpp"
#include "collectives/queue/autotune.hpp"
#include "core/base/error.hpp"
#include "node/segments/survivors.hpp"

namespace hsgd {

Communicator::Communicator(const std::string& path, Listener* listener, Place place,
                           std::unique_ptr<Transport> transport, const hsgd_options& options,
                           Watch* watch)
    : context_(path, listener, std::move(place), std::move(transport), options, watch) {
  or_give_up(
      context_.place().name(), [&] { autotune(context_); },
      [&](const Error& error) { context_.give_up(error, 0); });
}

Communicator::~Communicator() = default;

hsgd_topology Communicator::topology() const {
  const Place& place = context_.place();
  hsgd_topology topology{};
  topology.rank = place.rank;
  topology.size = place.size;
  topology.local_rank = place.local_rank;
  topology.local_size = place.local_size;
  topology.node_rank = place.node_rank;
  topology.node_count = place.node_count;
  topology.leaders = place.leaders;
  topology.nontemporal = context_.sizes().tuning().store == Store::kNonTemporal ? 1 : 0;
  topology.oneshot_bytes = context_.sizes().oneshot_bytes();
  topology.allreduce_bytes = context_.sizes().allreduce_oneshot_bytes();
  topology.chunk_bytes = context_.sizes().step_bytes();
  return topology;
}

hsgd_counters Communicator::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return context_.statistics().with(context_.links().counters());
}

int Communicator::local_rank_of(int world_rank) const { return context_.local_rank_of(world_rank); }

int Communicator::node_of(int world_rank) const { return context_.node_of(world_rank); }

void Communicator::tell_hosts(const std::string& names) { context_.note().tell_hosts(names); }

void Communicator::check_alive(int rank, const std::string& what) const {
  const int local_rank = local_rank_of(rank);
  if (local_rank != context_.place().local_rank) node().check_alive(local_rank, what);
}

namespace {

void run_collective(Context& context, const Operation& operation) {
  if (context.place().size == 1) {
    if (operation.root < 0 && operation.in != operation.out)
      context.copy()(operation.out, operation.in, operation.bytes(), Store::kOrdinary);
    return;
  }
  const hsgd_kind kind = operation.signature.kind();
  return kind_of(kind == kAllocate ? HSGD_ALLREDUCE : kind)->run(context, operation);
}

}  // namespace

// --- one after the other ---

void Communicator::check_mine() const {
  if (is_mine()) return;
  throw_error(HSGD_ERR_CLOSED, -1,
              "this communicator belongs to process %d, of which this one is a forked "
              "child; make one in each process",
              owner_.pid());
}

void Communicator::check_background() const {
  check_mine();
  const Place& place = context_.place();
  if (place.one_thread.empty()) return;
  throw Error(HSGD_ERR_SYSTEM, -1, "asynchronous collectives between nodes: " + place.one_thread);
}

void Communicator::check_threads() const {
  check_mine();
  const Place& place = context_.place();
  if (place.is_foreign_thread == nullptr) return;
  throw Error(HSGD_ERR_SYSTEM, -1, "asynchronous calls between nodes: " + place.why_foreign);
}

void Communicator::check_thread() const {
  const Place& place = context_.place();
  if (place.is_foreign_thread == nullptr || !place.is_foreign_thread()) return;
  throw Error(HSGD_ERR_SYSTEM, -1,
              "collectives between nodes, in this thread: " + place.why_foreign);
}

void Communicator::run(const hsgd_call& call) {
  run(kind_of(call.kind)->operation(context_, call));
}

void Communicator::run(const Operation& operation) {
  check_mine();
  check_thread();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) {
    check_left_out(node());
    throw Error(
        broken_->code(), broken_->rank(),
        std::string("this communicator is broken since an earlier error: ") + broken_->what());
  }
  struct Forget {  // the caller's label lives as long as the call
    Context& context;
    bool well;
    ~Forget() {
      context.forget_label();
      context.note().end_call(well);
    }
  } forget{context_, false};
  context_.restart_deadline();
  context_.begin(operation.signature, operation.label);
  context_.note().begin_call(context_.user_sequence(), operation.signature, operation.bytes(),
                             operation.label);
  Statistics& statistics = context_.statistics();
  Recorder& recorder = context_.recorder();
  const uint64_t weight = clock_weight(operation);
  const uint64_t start = weight > 0 ? ticks() : 0;
  const uint64_t waited = statistics.wait_ticks;
  recorder.begin(operation.label == nullptr ? nullptr : operation.label->name, operation.bytes());
  run_guarded(operation);
  forget.well = true;
  const uint64_t idle = statistics.wait_ticks - waited;
  if (operation.signature.kind() == kAllocate) {
    context_.set_shares();
  } else {
    ++statistics.counters.calls;
    statistics.counters.payload_bytes += operation.bytes();
    if (recorder.current() != nullptr) recorder.end(statistics.clock.to_ns(idle));
  }
  statistics.total_ticks += idle;
  if (weight == 0) return;
  const uint64_t worked = ticks() - start - idle;
  statistics.total_ticks += weight * worked;
  context_.stores().end(worked);
}

void Communicator::run_guarded(const Operation& operation) {
  try {
    run_collective(context_, operation);
  } catch (const Error& error) {
    if (error.code() == HSGD_ERR_SIGNATURE) {  // all ranks get it, before any data moved
      context_.skip_steps();
      throw;
    }
    give_up(error, context_.sequence(), context_.local().is_first_to_give_up());
    throw;
  } catch (const std::exception& error) {  // out of memory, most likely
    give_up(Error(HSGD_ERR_SYSTEM, context_.place().name(), error.what()), context_.sequence());
    throw;
  }
}

// Returns how many collectives this one counts for in the times. Reading the clock twice takes a
// tenth of a small collective: only every sixteenth of these is timed.
uint64_t Communicator::clock_weight(const Operation& operation) const {
  constexpr uint64_t kEvery = 16;
  if (operation.bytes() > context_.sizes().oneshot_bytes() || !context_.one_node()) return 1;
  return context_.user_sequence() % kEvery == 1 ? kEvery : 0;
}

void Communicator::give_up(const Error& error, uint64_t first_missed, bool is_first) {
  // A caller that waits for several calls, in any order, gets the error of the first one for each.
  const bool for_all = error.code() == HSGD_ERR_PEER_LOST || error.code() == HSGD_ERR_TIMEOUT;
  broken_.emplace(for_all ? error.code() : HSGD_ERR_CLOSED, error.rank(), error.what());
  context_.note().fail(error, context_.place().names.rank_of(error.rank()), is_first);
  context_.give_up(error, first_missed);
}

void Communicator::leave() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || broken_) return;
  const Place& place = context_.place();
  give_up(Error(HSGD_ERR_PEER_LOST, place.name(), node().closing(place.local_rank)),
          context_.sequence() + 1);
}

void Communicator::abandon(const Error& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_up(error, context_.sequence() + 1);
  throw Error(error);
}

}  // namespace hsgd
