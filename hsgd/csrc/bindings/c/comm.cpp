// The C interface of communicators: checks arguments and turns exceptions into status codes.
#include "bindings/c/handles.hpp"
#include "collectives/context/allreduce_plan.hpp"
#include "collectives/context/process.hpp"
#include "collectives/queue/call_table.hpp"
#include "collectives/queue/communicator.hpp"
#include "collectives/queue/split.hpp"
#include "core/base/calls.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/status.hpp"
#include "core/kernels/reduce.hpp"
#include "core/os/cgroup.hpp"
#include "core/os/cpu_budget.hpp"
#include "core/topology/nic_locality.hpp"
#include "hsgd_core.h"

namespace hsgd {
namespace {

int run_now(hsgd_comm* comm, const hsgd_call& call, hsgd_error* err) {
  return guarded(err, [&] {
    check_call(*comm->communicator, call);
    if (call.kind == HSGD_FUNCTION) return comm->submissions->run_function(call);
    comm->submissions->keep_order();
    execute_call(*comm->communicator, call);
  });
}

}  // namespace

void check_options(const hsgd_options& options) {
  if (options.struct_bytes != sizeof(hsgd_options)) {
    throw_invalid("hsgd_options has another size; caller and libhsgd_core differ in version");
  }
  if (!(options.timeout_s > 0 && options.timeout_s <= 1e9))
    throw_invalid("timeout_s is %g; give seconds above 0, up to 1e9", options.timeout_s);
  if (options.slots < 3 || options.slots > 64)
    throw_invalid("slots is %u; give 3 to 64", options.slots);
  constexpr int64_t kMostChunkBytes = 1 << 28;
  if (options.chunk_bytes == 0 || options.chunk_bytes > kMostChunkBytes ||
      options.wire_chunk_bytes > static_cast<uint64_t>(kMostChunkBytes)) {
    throw_invalid(
        "chunk_bytes must not be 0, and chunk_bytes and wire_chunk_bytes be at most 268435456");
  }
  if (options.oneshot_bytes > 1 << 20 || options.wire_oneshot_bytes > 1 << 20)
    throw_invalid("oneshot_bytes and wire_oneshot_bytes must be at most 1048576");
  if (options.wire_radix < 2 || options.wire_radix > 64)
    throw_invalid("wire_radix is %u; give a number from 2 to 64", options.wire_radix);
  if (options.flat_ranks < 1 || options.flat_ranks > 1024)
    throw_invalid("flat_ranks is %u; give a number from 1 to 1024", options.flat_ranks);
  if (options.near_nic > 1024)
    throw_invalid("near_nic is %d; give a number up to 1024", options.near_nic);
  if (options.wire_dtype != HSGD_FLOAT32 && options.wire_dtype != HSGD_FLOAT16 &&
      options.wire_dtype != HSGD_BFLOAT16)
    throw_invalid("wire_dtype is %u; give HSGD_FLOAT32 (none), HSGD_FLOAT16 or HSGD_BFLOAT16",
                  options.wire_dtype);
  if (options.nontemporal > 2)
    throw_invalid("nontemporal is %u; give 0, 1 or 2", options.nontemporal);
}

hsgd_comm* new_comm(std::unique_ptr<Communicator> communicator) {
  auto submissions = std::make_shared<Submissions>(*communicator, execute_call);
  return new hsgd_comm{std::move(communicator), std::move(submissions)};
}

std::unique_ptr<NotifiedWindow> new_window(hsgd_comm& comm, const WindowOptions& options,
                                           const NotifiedWindow::MakeRma& over_mpi) {
  check_options(options);
  comm.submissions->keep_order();
  return open_window(*comm.communicator, options, over_mpi);
}

}  // namespace hsgd

using hsgd::guarded;

hsgd_process* hsgd_process_create(void) {
  try {
    return new hsgd_process;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void hsgd_process_destroy(hsgd_process* process) { delete process; }
const char* hsgd_simd_name(void) { return hsgd::isa_name(hsgd::detect_isa()); }
int hsgd_usable_cores(void) { return hsgd::count_cores(hsgd::own_cores()); }
uint64_t hsgd_memory_limit_bytes(void) { return hsgd::Cgroups().memory_limit_bytes(); }

int hsgd_near_nic(const hsgd_options* options) {
  return options->near_nic >= 0 ? options->near_nic : hsgd::nic_of_process();
}

int hsgd_plan_allreduce(const hsgd_options* options, int nodes, int ranks_per_node, uint64_t bytes,
                        hsgd_allreduce_plan* plan, hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_options(*options);
    *plan = hsgd::plan_allreduce(*options, nodes, ranks_per_node, bytes);
  });
}

int hsgd_comm_create_local(const char* path, int rank, int size, const hsgd_options* options,
                           hsgd_comm** comm, hsgd_error* err) {
  return guarded(err, [&] {
    *comm = nullptr;
    hsgd::check_options(*options);
    if (size < 1 || rank < 0 || rank >= size) {
      hsgd::throw_error(HSGD_ERR_ARGUMENT, rank,
                        "rank %d of %d: give a size of at least 1 and a rank from 0 to size - 1",
                        rank, size);
    }
    hsgd::Place place;
    place.rank = place.local_rank = rank;
    place.size = place.local_size = size;
    *comm = hsgd::new_comm(
        std::make_unique<hsgd::Communicator>(path, nullptr, std::move(place), nullptr, *options));
  });
}

// Destroys a communicator. A forked child inherits the handle but is no rank: it must not report to
// the peers that this rank left, nor call MPI. Its inherited memory is freed when it ends.
void hsgd_comm_destroy(hsgd_comm* comm) {
  if (comm == nullptr || !comm->communicator->is_mine()) return;
  if (comm->submissions->after_collective([comm] { hsgd_comm_destroy(comm); })) return;
  comm->submissions->close();
  delete comm;
}

void hsgd_comm_topology(const hsgd_comm* comm, hsgd_topology* topology) {
  *topology = comm->communicator->topology();
}

int hsgd_comm_rank_name(const hsgd_comm* comm, int rank) {
  return comm->communicator->place().names.of(rank);
}

int hsgd_comm_node_of(const hsgd_comm* comm, int rank) { return comm->communicator->node_of(rank); }

void hsgd_comm_tell_hosts(hsgd_comm* comm, const char* hosts) {
  static_cast<void>(guarded(nullptr, [&] { comm->communicator->tell_hosts(hosts); }));
}

int hsgd_comm_descriptor(const hsgd_comm* comm) { return comm->communicator->descriptor(); }

void hsgd_comm_counters(const hsgd_comm* comm, hsgd_counters* counters) {
  *counters = comm->communicator->counters();
}

void hsgd_comm_abort(hsgd_comm* comm) {
  if (comm->communicator->is_mine()) comm->communicator->stop_waiting(true);
}

void hsgd_comm_expire(hsgd_comm* comm, double timeout_s) {
  if (comm->communicator->is_mine()) comm->communicator->expire(timeout_s);
}

void hsgd_comm_request_stop(hsgd_comm* comm) { comm->communicator->request_stop(); }

int hsgd_comm_stop_requested(const hsgd_comm* comm) {
  return comm->communicator->stop_requested() ? 1 : 0;
}

void hsgd_comm_explain_leaving(hsgd_comm* comm, const char* words) {
  if (!comm->communicator->is_mine()) return;
  static_cast<void>(guarded(nullptr, [&] { comm->communicator->explain_leaving(words); }));
}

void hsgd_comm_leave(hsgd_comm* comm) {
  if (comm->communicator->is_mine()) comm->communicator->leave();
}

void hsgd_comm_keep_records(hsgd_comm* comm, uint64_t capacity) {
  comm->communicator->recorder().keep(capacity);
}

uint64_t hsgd_comm_take_records(hsgd_comm* comm, hsgd_record* records, uint64_t capacity) {
  return comm->communicator->recorder().take(records, capacity);
}

int hsgd_comm_allreduce(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                        hsgd_dtype dtype, hsgd_op op, const hsgd_label* label, hsgd_error* err) {
  return hsgd::run_now(comm, hsgd::allreduce_call(in, out, count, dtype, op, label), err);
}

int hsgd_comm_broadcast(hsgd_comm* comm, void* data, uint64_t count, hsgd_dtype dtype, int root,
                        const hsgd_label* label, hsgd_error* err) {
  return hsgd::run_now(comm, hsgd::broadcast_call(data, count, dtype, root, label), err);
}

int hsgd_comm_reduce_scatter(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                             hsgd_dtype dtype, hsgd_op op, const hsgd_label* label,
                             hsgd_error* err) {
  return hsgd::run_now(comm, hsgd::reduce_scatter_call(in, out, counts, dtype, op, label), err);
}

int hsgd_comm_allgather(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                        hsgd_dtype dtype, const hsgd_label* label, hsgd_error* err) {
  return hsgd::run_now(comm, hsgd::allgather_call(in, out, counts, dtype, label), err);
}

int hsgd_comm_alltoall(hsgd_comm* comm, const void* in, const uint64_t* send_counts, void* out,
                       const uint64_t* receive_counts, hsgd_dtype dtype, const hsgd_label* label,
                       hsgd_error* err) {
  return hsgd::run_now(
      comm, hsgd::alltoall_call(in, send_counts, out, receive_counts, dtype, label), err);
}

int hsgd_comm_barrier(hsgd_comm* comm, hsgd_error* err) {
  return hsgd::run_now(comm, hsgd::barrier_call(), err);
}

int hsgd_comm_run(hsgd_comm* comm, const hsgd_call* call, hsgd_error* err) {
  return hsgd::run_now(comm, *call, err);
}

int hsgd_comm_start(hsgd_comm* comm, const hsgd_call* call, hsgd_request** request,
                    hsgd_error* err) {
  return guarded(err, [&] {
    *request = nullptr;
    hsgd::check_call(*comm->communicator, *call);
    auto submitted = std::make_unique<hsgd_request>();
    submitted->submissions = comm->submissions;
    submitted->request = comm->submissions->submit(*call);
    *request = submitted.release();
  });
}

int hsgd_request_done(const hsgd_request* request) { return request->request->done() ? 1 : 0; }

int hsgd_request_wait(hsgd_request* request, double timeout_s, hsgd_error* err) {
  return request->submissions->wait(*request->request, timeout_s, err);
}

// Frees a request; does nothing in a forked child, where threads of the parent may seem to wait on
// it.
void hsgd_request_free(hsgd_request* request) {
  if (request != nullptr && request->submissions->is_mine()) delete request;
}

namespace {

int allocate(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype, bool once_per_node,
             const hsgd_label* label, hsgd_buffer** buffer, hsgd_error* err) {
  return guarded(err, [&] {
    *buffer = nullptr;
    hsgd::check_type(dtype, HSGD_SUM);
    hsgd::checked_bytes(count, dtype);
    comm->submissions->keep_order();
    auto memory = comm->communicator->allocate(count, dtype, once_per_node, label);
    std::byte* data = once_per_node ? memory->data(0) : memory->own();
    *buffer = new hsgd_buffer{std::move(memory), data};
  });
}

}  // namespace

int hsgd_comm_allocate(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype, const hsgd_label* label,
                       hsgd_buffer** buffer, hsgd_error* err) {
  return allocate(comm, count, dtype, false, label, buffer, err);
}

int hsgd_comm_allocate_shared(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype,
                              const hsgd_label* label, hsgd_buffer** buffer, hsgd_error* err) {
  return allocate(comm, count, dtype, true, label, buffer, err);
}

void* hsgd_buffer_data(const hsgd_buffer* buffer) { return buffer->data; }

void hsgd_buffer_free(hsgd_buffer* buffer) { delete buffer; }

int hsgd_comm_shrink(hsgd_comm* comm, double timeout_s, hsgd_comm** shrunk, hsgd_error* err) {
  return guarded(err, [&] {
    *shrunk = nullptr;
    if (!(timeout_s > 0 && timeout_s <= 1e9)) {
      hsgd::throw_invalid("shrink: timeout_s is %g; give seconds above 0, up to 1e9", timeout_s);
    }
    comm->submissions->keep_order();
    *shrunk = hsgd::new_comm(comm->communicator->shrink(timeout_s));
  });
}

int hsgd_reduce(const void* const* in, int inputs, void* out, uint64_t count, hsgd_dtype dtype,
                hsgd_op op, hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_type(dtype, op);
    if (inputs < 1) hsgd::throw_invalid("%d inputs; give at least 1", inputs);
    const double divisor = op == HSGD_MEAN ? static_cast<double>(inputs) : 1.0;
    hsgd::select_reduce(dtype, op, hsgd::detect_isa())(
        {in, inputs, out, nullptr, count, divisor, hsgd::Store::kOrdinary, hsgd::Store::kOrdinary});
  });
}

void hsgd_stream_copy(void* to, const void* from, uint64_t bytes) {
  hsgd::select_copy(hsgd::detect_isa())(to, from, bytes, hsgd::Store::kNonTemporal);
}

int hsgd_comm_split(hsgd_comm* comm, int color, int key, const int32_t* rank_names,
                    hsgd_comm** part, hsgd_error* err) {
  return guarded(err, [&] {
    *part = nullptr;
    comm->submissions->keep_order();
    auto communicator = hsgd::split(*comm->communicator, color, key, rank_names);
    if (communicator != nullptr) *part = hsgd::new_comm(std::move(communicator));
  });
}
