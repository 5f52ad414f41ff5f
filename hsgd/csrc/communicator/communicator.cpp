// Arguments, order and errors.
#include "communicator/communicator.hpp"

#include <numeric>

#include "collectives/collectives.hpp"
#include "communicator/autotune.hpp"
#include "node/survivors.hpp"

namespace hsgd {

Communicator::Communicator(const std::string& path, Listener* listener, Place place,
                           std::unique_ptr<Transport> transport, const hsgd_options& options,
                           Watch* watch)
    : context_(path, listener, std::move(place), std::move(transport), options, watch) {
  autotune(context_);
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
  topology.chunk_bytes = context_.sizes().step_bytes();
  return topology;
}

hsgd_counters Communicator::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return context_.statistics().with(context_.links().counters());
}

int Communicator::local_rank_of(int world_rank) const { return context_.local_rank_of(world_rank); }

int Communicator::node_of(int world_rank) const { return context_.node_of(world_rank); }

void Communicator::check_alive(int rank, const std::string& what) const {
  const int local_rank = local_rank_of(rank);
  if (local_rank != context_.place().local_rank) node().check_alive(local_rank, what);
}

// --- collectives ---

// Without count and signature. With narrowing, for float32 and on request, half the bytes travel
// between nodes. Field by field: a struct that is stored in parts and copied as a whole waits for
// its parts.
Operation Communicator::reduction_of(const void* in, void* out, hsgd_dtype dtype, hsgd_op op,
                                     const hsgd_label* label) const {
  Operation operation;
  operation.label = label;
  operation.in = in;
  operation.out = out;
  Reduction& reduction = operation.reduction;
  reduction.reduce = select_reduce(dtype, op, context_.isa());
  reduction.copy = context_.copy();
  reduction.element_bytes = hsgd_dtype_bytes(dtype);
  if (op == HSGD_MEAN) reduction.divisor = static_cast<double>(context_.place().size);
  const auto narrow = static_cast<hsgd_dtype>(options().wire_dtype);
  if (narrow != HSGD_FLOAT32 && dtype == HSGD_FLOAT32) {
    reduction.narrowing = {select_conversion(narrow, context_.isa()),
                           select_reduce(narrow, op, context_.isa())};
  }
  return operation;
}

void Communicator::allreduce(const void* in, void* out, uint64_t count, hsgd_dtype dtype,
                             hsgd_op op, const hsgd_label* label) {
  Operation operation = reduction_of(in, out, dtype, op, label);
  operation.signature = Signature::pack(Kind::kAllreduce, dtype, op, 0, count, hash_label(label));
  operation.count = count;
  run(operation);
}

void Communicator::broadcast(void* data, uint64_t count, hsgd_dtype dtype, int root,
                             const hsgd_label* label) {
  Operation operation;
  operation.signature =
      Signature::pack(Kind::kBroadcast, dtype, HSGD_SUM, root, count, hash_label(label));
  operation.label = label;
  operation.in = operation.out = data;
  operation.count = count;
  operation.reduction = {nullptr, context_.copy(), hsgd_dtype_bytes(dtype), 1.0};
  operation.root = root;
  run(operation);
}

void Communicator::barrier() {
  Operation operation;
  operation.signature = Signature::pack(Kind::kBarrier, HSGD_UINT8, HSGD_SUM, 0, 0, 0);
  operation.reduction = {select_reduce(HSGD_UINT8, HSGD_SUM, context_.isa()), context_.copy(), 1,
                         1.0};
  run(operation);
}

void Communicator::reduce_scatter(const void* in, void* out, const uint64_t* counts,
                                  hsgd_dtype dtype, hsgd_op op, const hsgd_label* label) {
  const Place& place = context_.place();
  Operation operation = reduction_of(in, out, dtype, op, label);
  operation.counts = {counts, place.size};
  operation.count = std::accumulate(counts, counts + place.size, uint64_t{0});
  operation.signature = Signature::pack(Kind::kReduceScatter, dtype, op, 0, operation.count,
                                        hash_label(label, operation.counts));
  operation.part.begin = std::accumulate(counts, counts + place.rank, uint64_t{0});
  operation.part.end = operation.part.begin + counts[place.rank];
  run(operation);
}

void Communicator::allgather(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                             const hsgd_label* label) {
  Operation operation = allgather_operation(context_, counts, dtype, label);
  operation.in = in;
  operation.out = out;
  run(operation);
}

void Communicator::alltoall(const void* in, const uint64_t* send_counts, void* out,
                            const uint64_t* receive_counts, hsgd_dtype dtype,
                            const hsgd_label* label) {
  const int size = context_.place().size;
  if (size == 1 && send_counts[0] != receive_counts[0]) {
    fail_counts("alltoall", label, 0, send_counts[0], 0, receive_counts[0], dtype);
  }
  Operation operation;
  operation.counts = {send_counts, size};
  operation.receive_counts = receive_counts;
  operation.count = std::accumulate(send_counts, send_counts + size, uint64_t{0});
  operation.signature = Signature::pack(Kind::kAlltoall, dtype, HSGD_SUM, 0, 0, hash_label(label));
  operation.label = label;
  operation.in = in;
  operation.out = out;
  operation.reduction = {nullptr, context_.copy(), hsgd_dtype_bytes(dtype), 1.0};
  run(operation);
}

namespace {

void run_collective(Context& context, const Operation& operation) {
  if (context.place().size == 1) {
    if (operation.root < 0 && operation.in != operation.out)
      context.copy()(operation.out, operation.in, operation.bytes(), Store::kOrdinary);
    return;
  }
  switch (operation.signature.kind()) {
    case Kind::kAllreduce:
    case Kind::kBarrier:
    case Kind::kAllocate:
      return run_allreduce(context, operation);
    case Kind::kBroadcast:
      return run_broadcast(context, operation);
    case Kind::kReduceScatter:
      return run_reduce_scatter(context, operation);
    case Kind::kAllgather:
      return run_allgather(context, operation);
    case Kind::kAlltoall:
      return run_alltoall(context, operation);
  }
}

}  // namespace

// --- one after the other ---

void Communicator::check_mine() const {
  if (is_mine()) return;
  throw Error(HSGD_ERR_CLOSED, -1,
              text("this communicator belongs to process %d, of which this one is a forked "
                   "child; make one in each process",
                   owner_.pid()));
}

void Communicator::check_background() const {
  check_mine();
  const Place& place = context_.place();
  if (place.one_thread.empty()) return;
  throw Error(HSGD_ERR_SYSTEM, -1, "asynchronous collectives between nodes: " + place.one_thread);
}

void Communicator::check_thread() const {
  const Place& place = context_.place();
  if (place.is_foreign_thread == nullptr || !place.is_foreign_thread()) return;
  throw Error(HSGD_ERR_SYSTEM, -1,
              "collectives between nodes, in this thread: " + place.why_foreign);
}

void Communicator::run(const Operation& operation) {
  check_mine();
  check_thread();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) {
    check_left_out(node());
    throw Error(HSGD_ERR_CLOSED, -1,
                "this communicator is broken since an earlier error: " + broken_);
  }
  struct Forget {  // the caller's label lives as long as the call
    Context& context;
    ~Forget() { context.forget_label(); }
  } forget{context_};
  context_.restart_deadline();
  context_.begin(operation.signature, operation.label);
  Statistics& statistics = context_.statistics();
  Recorder& recorder = context_.recorder();
  const uint64_t weight = clock_weight(operation);
  const uint64_t start = weight > 0 ? ticks() : 0;
  const uint64_t waited = statistics.wait_ticks;
  recorder.begin(operation.label == nullptr ? nullptr : operation.label->name, operation.bytes());
  run_guarded(operation);
  const uint64_t idle = statistics.wait_ticks - waited;
  if (operation.signature.kind() == Kind::kAllocate) {
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
    if (error.code() == HSGD_ERR_SIGNATURE) {  // seen by all ranks alike, before any data moved
      context_.skip_steps();
      throw;
    }
    give_up(error, context_.sequence());
    throw;
  } catch (const std::exception& error) {  // out of memory, most likely
    give_up(Error(HSGD_ERR_SYSTEM, context_.place().rank, error.what()), context_.sequence());
    throw;
  }
}

// How many collectives this one's work stands for in the counters. Reading the clock twice takes a
// tenth of a small one: of those every sixteenth is timed, and counts for all of them.
uint64_t Communicator::clock_weight(const Operation& operation) const {
  constexpr uint64_t kEvery = 16;
  if (operation.bytes() > context_.sizes().oneshot_bytes() || !context_.one_node()) return 1;
  return context_.user_sequence() % kEvery == 1 ? kEvery : 0;
}

void Communicator::give_up(const Error& error, uint64_t first_missed) {
  broken_ = error.what();
  context_.give_up(error, first_missed);
}

void Communicator::leave() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !broken_.empty()) return;
  const Place& place = context_.place();
  give_up(Error(HSGD_ERR_PEER_LOST, place.rank, node().closing(place.local_rank)),
          context_.sequence() + 1);
}

void Communicator::abandon(const Error& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_up(error, context_.sequence() + 1);
  throw Error(error);
}

}  // namespace hsgd
