// The C interface over Communicator: checks arguments, turns exceptions into status codes.
#include "capi.hpp"
#include "communicator.hpp"
#include "hier.hpp"
#include "hsgd_core.h"
#include "reduce.hpp"

namespace hsgd {
namespace {

constexpr struct {
  const char* name;
  size_t bytes;
  bool floating;
} kDtypes[HSGD_DTYPE_COUNT] = {
    {"float32", 4, true}, {"float64", 8, true}, {"float16", 2, true}, {"bfloat16", 2, true},
    {"int8", 1, false},   {"int32", 4, false},  {"int64", 8, false},  {"uint8", 1, false},
};
constexpr const char* kOps[HSGD_OP_COUNT] = {"sum", "mean", "min", "max", "prod"};

bool valid(hsgd_dtype dtype) { return dtype >= 0 && dtype < HSGD_DTYPE_COUNT; }
bool valid(hsgd_op op) { return op >= 0 && op < HSGD_OP_COUNT; }

void check_type(hsgd_dtype dtype, hsgd_op op) {
  if (!valid(dtype))
    throw Error(HSGD_ERR_ARGUMENT, -1, text("unknown dtype code %d", static_cast<int>(dtype)));
  if (!valid(op))
    throw Error(HSGD_ERR_ARGUMENT, -1, text("unknown op code %d", static_cast<int>(op)));
  if (op == HSGD_MEAN && !kDtypes[dtype].floating) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("mean of %s is not defined here; use sum and divide as your program needs, or "
                     "a floating dtype",
                     kDtypes[dtype].name));
  }
}

// A buffer of a collective, and where in it the other one may lie.
struct Buffer {
  const void* data;
  uint64_t bytes;
  uint64_t place = 0;
};
constexpr uint64_t kNowhere = UINT64_MAX;

void check_buffers(const Buffer& in, const Buffer& out, const char* allowed) {
  if ((in.bytes > 0 && in.data == nullptr) || (out.bytes > 0 && out.data == nullptr))
    throw Error(HSGD_ERR_ARGUMENT, -1, "a buffer is NULL");
  const auto a = reinterpret_cast<uintptr_t>(in.data);
  const auto b = reinterpret_cast<uintptr_t>(out.data);
  const bool apart = a + in.bytes <= b || b + out.bytes <= a || in.bytes == 0 || out.bytes == 0;
  const bool in_place = in.place != kNowhere && a + in.place == b + out.place;
  if (apart || in_place) return;
  throw Error(HSGD_ERR_ARGUMENT, -1,
              text("input and output overlap; pass %s separate ones", allowed));
}

void check_buffers(const void* in, const void* out, uint64_t bytes) {
  check_buffers({in, bytes}, {out, bytes}, "the same buffer or");
}

uint64_t checked_bytes(uint64_t count, hsgd_dtype dtype) {
  const uint64_t size = kDtypes[dtype].bytes;
  if (count > UINT64_MAX / 16) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("%llu elements are too many", static_cast<unsigned long long>(count)));
  }
  return count * size;
}

// The blocks of a packed buffer.
struct Blocks {
  uint64_t before = 0;  // bytes in front of this rank's
  uint64_t own = 0;
  uint64_t total = 0;
};

Blocks checked_blocks(const hsgd_comm* comm, const uint64_t* counts, hsgd_dtype dtype) {
  if (counts == nullptr) throw Error(HSGD_ERR_ARGUMENT, -1, "counts is NULL");
  const hsgd_topology place = comm->communicator->topology();
  uint64_t count = 0;
  Blocks blocks;
  for (int rank = 0; rank < place.size; ++rank) {
    if (rank == place.rank) blocks.before = count * kDtypes[dtype].bytes;
    checked_bytes(counts[rank], dtype);
    count += counts[rank];
    blocks.total = checked_bytes(count, dtype);
  }
  blocks.own = counts[place.rank] * kDtypes[dtype].bytes;
  return blocks;
}

void check_kind(hsgd_kind kind) {
  if (kind < 0 || kind >= HSGD_KIND_COUNT)
    throw Error(HSGD_ERR_ARGUMENT, -1, text("unknown kind %d", static_cast<int>(kind)));
}

void check_allreduce(const Communicator&, const hsgd_call& call) {
  check_type(call.dtype, call.op);
  check_buffers(call.in, call.out, checked_bytes(call.count, call.dtype));
}

void check_broadcast(const Communicator& communicator, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  check_buffers(call.out, call.out, checked_bytes(call.count, call.dtype));
  const int size = communicator.topology().size;
  if (call.root < 0 || call.root >= size || call.root > kMaxRoot) {
    throw Error(HSGD_ERR_ARGUMENT, call.root,
                text("broadcast: root %d is not a rank; ranks are 0 to %d", call.root, size - 1));
  }
}

// What each kind checks before anything is sent, and what it does.
constexpr struct {
  void (*check)(const Communicator&, const hsgd_call&);
  void (*execute)(Communicator&, const hsgd_call&);
} kCollectives[HSGD_KIND_COUNT] = {
    {check_allreduce,
     [](Communicator& communicator, const hsgd_call& call) {
       communicator.allreduce(call.in, call.out, call.count, call.dtype, call.op, call.label);
     }},
    {check_broadcast,
     [](Communicator& communicator, const hsgd_call& call) {
       communicator.broadcast(call.out, call.count, call.dtype, call.root, call.label);
     }},
    {[](const Communicator&, const hsgd_call&) {},
     [](Communicator& communicator, const hsgd_call&) { communicator.barrier(); }},
};

void execute(Communicator& communicator, const hsgd_call& call) {
  kCollectives[call.kind].execute(communicator, call);
}

int run_now(hsgd_comm* comm, const hsgd_call& call, hsgd_error* err) {
  return guarded(err, [&] {
    check_kind(call.kind);
    kCollectives[call.kind].check(*comm->communicator, call);
    comm->submissions->keep_order();
    execute(*comm->communicator, call);
  });
}

}  // namespace

void check_options(const hsgd_options& options) {
  if (options.struct_bytes != sizeof(hsgd_options)) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "hsgd_options has another size; caller and libhsgd_core differ in version");
  }
  if (!(options.timeout_s > 0 && options.timeout_s <= 1e9))
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("timeout_s is %g; give seconds above 0, up to 1e9", options.timeout_s));
  if (options.slots < 3 || options.slots > 64)
    throw Error(HSGD_ERR_ARGUMENT, -1, text("slots is %u; give 3 to 64", options.slots));
  constexpr int64_t kMostChunkBytes = 1 << 28;
  if (options.chunk_bytes == 0 || options.chunk_bytes > kMostChunkBytes ||
      options.wire_chunk_bytes > static_cast<uint64_t>(kMostChunkBytes)) {
    throw Error(
        HSGD_ERR_ARGUMENT, -1,
        "chunk_bytes must not be 0, and chunk_bytes and wire_chunk_bytes be at most 268435456");
  }
  if (options.oneshot_bytes > 1 << 20 || options.wire_oneshot_bytes > 1 << 20)
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "oneshot_bytes and wire_oneshot_bytes must be at most 1048576");
  if (options.wire_dtype != HSGD_FLOAT32 && options.wire_dtype != HSGD_FLOAT16 &&
      options.wire_dtype != HSGD_BFLOAT16)
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("wire_dtype is %u; give HSGD_FLOAT32 (none), HSGD_FLOAT16 or HSGD_BFLOAT16",
                     options.wire_dtype));
  if (options.nontemporal > 2)
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("nontemporal is %u; give 0, 1 or 2", options.nontemporal));
}

hsgd_comm* new_comm(std::unique_ptr<Communicator> communicator) {
  auto submissions = std::make_shared<Submissions>(*communicator, execute);
  return new hsgd_comm{std::move(communicator), std::move(submissions)};
}

}  // namespace hsgd

using hsgd::guarded;

uint32_t hsgd_abi_version(void) { return HSGD_ABI_VERSION; }
size_t hsgd_dtype_bytes(hsgd_dtype dtype) {
  return hsgd::valid(dtype) ? hsgd::kDtypes[dtype].bytes : 0;
}
const char* hsgd_dtype_name(hsgd_dtype dtype) {
  return hsgd::valid(dtype) ? hsgd::kDtypes[dtype].name : "unknown dtype";
}
const char* hsgd_op_name(hsgd_op op) { return hsgd::valid(op) ? hsgd::kOps[op] : "unknown op"; }
const char* hsgd_simd_name(void) { return hsgd::isa_name(hsgd::detect_isa()); }

int hsgd_comm_create_local(const char* path, int rank, int size, const hsgd_options* options,
                           hsgd_comm** comm, hsgd_error* err) {
  return guarded(err, [&] {
    *comm = nullptr;
    hsgd::check_options(*options);
    if (size < 1 || rank < 0 || rank >= size) {
      throw hsgd::Error(
          HSGD_ERR_ARGUMENT, rank,
          hsgd::text("rank %d of %d: give a size of at least 1 and a rank from 0 to size - 1", rank,
                     size));
    }
    hsgd::Place place;
    place.rank = place.local_rank = rank;
    place.size = place.local_size = size;
    *comm = hsgd::new_comm(
        std::make_unique<hsgd::Communicator>(path, nullptr, std::move(place), nullptr, *options));
  });
}

// A forked child inherits the handle but is no rank: it must not tell the peers that this rank
// left, nor call MPI. What it inherited goes when it ends.
void hsgd_comm_destroy(hsgd_comm* comm) {
  if (comm == nullptr || !comm->communicator->is_mine()) return;
  comm->submissions->close();
  delete comm;
}

void hsgd_comm_topology(const hsgd_comm* comm, hsgd_topology* topology) {
  *topology = comm->communicator->topology();
}

void hsgd_comm_counters(const hsgd_comm* comm, hsgd_counters* counters) {
  *counters = comm->communicator->counters();
}

int hsgd_comm_allreduce(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                        hsgd_dtype dtype, hsgd_op op, const hsgd_label* label, hsgd_error* err) {
  hsgd_call call{};
  call.kind = HSGD_ALLREDUCE;
  call.in = in;
  call.out = out;
  call.count = count;
  call.dtype = dtype;
  call.op = op;
  call.label = label;
  return hsgd::run_now(comm, call, err);
}

int hsgd_comm_broadcast(hsgd_comm* comm, void* data, uint64_t count, hsgd_dtype dtype, int root,
                        const hsgd_label* label, hsgd_error* err) {
  hsgd_call call{};
  call.kind = HSGD_BROADCAST;
  call.in = call.out = data;
  call.count = count;
  call.dtype = dtype;
  call.root = root;
  call.label = label;
  return hsgd::run_now(comm, call, err);
}

int hsgd_comm_barrier(hsgd_comm* comm, hsgd_error* err) {
  hsgd_call call{};
  call.kind = HSGD_BARRIER;
  return hsgd::run_now(comm, call, err);
}

int hsgd_comm_run(hsgd_comm* comm, const hsgd_call* call, hsgd_error* err) {
  return hsgd::run_now(comm, *call, err);
}

int hsgd_comm_start(hsgd_comm* comm, const hsgd_call* call, hsgd_request** request,
                    hsgd_error* err) {
  return guarded(err, [&] {
    *request = nullptr;
    hsgd::check_kind(call->kind);
    hsgd::kCollectives[call->kind].check(*comm->communicator, *call);
    auto made = std::make_unique<hsgd_request>();
    made->submissions = comm->submissions;
    made->request = comm->submissions->submit(*call);
    *request = made.release();
  });
}

int hsgd_request_done(const hsgd_request* request) { return request->request->done() ? 1 : 0; }

int hsgd_request_wait(hsgd_request* request, double timeout_s, hsgd_error* err) {
  return request->submissions->wait(*request->request, timeout_s, err);
}

// In a forked child threads of the parent may seem to wait on what this would destroy.
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
    *buffer = new hsgd_buffer{std::move(memory)};
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

void* hsgd_buffer_data(const hsgd_buffer* buffer) {
  std::byte* whole = buffer->memory->whole();
  return whole != nullptr ? whole : buffer->memory->own();
}

void hsgd_buffer_free(hsgd_buffer* buffer) { delete buffer; }

int hsgd_comm_reduce_scatter(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                             hsgd_dtype dtype, hsgd_op op, const hsgd_label* label,
                             hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_type(dtype, op);
    const hsgd::Blocks blocks = hsgd::checked_blocks(comm, counts, dtype);
    hsgd::check_buffers({in, blocks.total, blocks.before}, {out, blocks.own},
                        "this rank's block of the input as output, or");
    comm->submissions->keep_order();
    comm->communicator->reduce_scatter(in, out, counts, dtype, op, label);
  });
}

int hsgd_comm_allgather(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                        hsgd_dtype dtype, const hsgd_label* label, hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_type(dtype, HSGD_SUM);
    const hsgd::Blocks blocks = hsgd::checked_blocks(comm, counts, dtype);
    hsgd::check_buffers({in, blocks.own}, {out, blocks.total, blocks.before},
                        "this rank's block of the output as input, or");
    comm->submissions->keep_order();
    comm->communicator->allgather(in, out, counts, dtype, label);
  });
}

int hsgd_comm_alltoall(hsgd_comm* comm, const void* in, const uint64_t* send_counts, void* out,
                       const uint64_t* receive_counts, hsgd_dtype dtype, const hsgd_label* label,
                       hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_type(dtype, HSGD_SUM);
    const hsgd::Blocks sent = hsgd::checked_blocks(comm, send_counts, dtype);
    const hsgd::Blocks received = hsgd::checked_blocks(comm, receive_counts, dtype);
    hsgd::check_buffers({in, sent.total, hsgd::kNowhere}, {out, received.total}, "two");
    comm->submissions->keep_order();
    comm->communicator->alltoall(in, send_counts, out, receive_counts, dtype, label);
  });
}

int hsgd_comm_shrink(hsgd_comm* comm, double timeout_s, hsgd_comm** shrunk, hsgd_error* err) {
  return guarded(err, [&] {
    *shrunk = nullptr;
    if (!(timeout_s > 0 && timeout_s <= 1e9)) {
      throw hsgd::Error(
          HSGD_ERR_ARGUMENT, -1,
          hsgd::text("shrink: timeout_s is %g; give seconds above 0, up to 1e9", timeout_s));
    }
    comm->submissions->keep_order();
    *shrunk = hsgd::new_comm(comm->communicator->shrink(timeout_s));
  });
}

int hsgd_reduce(const void* const* in, int inputs, void* out, uint64_t count, hsgd_dtype dtype,
                hsgd_op op, hsgd_error* err) {
  return guarded(err, [&] {
    hsgd::check_type(dtype, op);
    if (inputs < 1)
      throw hsgd::Error(HSGD_ERR_ARGUMENT, -1, hsgd::text("%d inputs; give at least 1", inputs));
    const double divisor = op == HSGD_MEAN ? static_cast<double>(inputs) : 1.0;
    hsgd::select_reduce(dtype, op, hsgd::detect_isa())(
        {in, inputs, out, nullptr, count, divisor, hsgd::Store::kOrdinary, hsgd::Store::kOrdinary});
  });
}
