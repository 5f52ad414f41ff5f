// Decides which calls are taken, and runs them.
#include "bindings/mpi_interposer/dispatch.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <exception>
#include <new>
#include <vector>

#include "bindings/mpi_interposer/datatypes.hpp"
#include "bindings/mpi_interposer/device_memory.hpp"
#include "bindings/mpi_interposer/failure.hpp"
#include "bindings/mpi_interposer/settings.hpp"
#include "bindings/mpi_interposer/user_op.hpp"

namespace hsgd::pmpi {
namespace {

Taken pass(Collective collective, uint64_t bytes) {
  count_passed(collective, bytes);
  return std::nullopt;
}

// Returns the number of ranks of the local group; 0 on an error.
int ranks_of(MPI_Comm comm) {
  int size = 0;
  if (comm == MPI_COMM_NULL || PMPI_Comm_size(comm, &size) != MPI_SUCCESS) return 0;
  return size;
}

hsgd_topology topology_of(const hsgd_comm* comm) {
  hsgd_topology place;
  hsgd_comm_topology(comm, &place);
  return place;
}

int rank_of(const hsgd_comm* comm) { return topology_of(comm).rank; }
int nodes_of(const hsgd_comm* comm) { return topology_of(comm).node_count; }
bool on_one_node(const hsgd_comm* comm) { return nodes_of(comm) == 1; }

void describe(const char* message, hsgd_error* error) {
  error->code = HSGD_ERR_SYSTEM;
  error->rank = -1;
  std::strncpy(error->message, message, sizeof error->message - 1);
  error->message[sizeof error->message - 1] = '\0';
}

// A range of payloads in bytes, both ends included.
struct Sizes {
  uint64_t least, most;
  bool hold(uint64_t bytes) const { return least <= bytes && bytes <= most; }
};

// The payloads for which the two-level path is faster than PMPI, as measured (docs/performance.md)
// or, on many nodes, simulated (docs/internals/scale.md). Fixed, so that all ranks choose alike.
struct Worthwhile {
  Sizes on_node, between_nodes;
  int most_nodes;
  // True: set up the communicator at the first call on MPI_COMM_WORLD, which stays, or of a size
  // that gradients have; such calls come again. Others must first be worth the milliseconds that
  // the set-up takes.
  bool gradients_at_once;
  bool somewhere(uint64_t bytes) const { return on_node.hold(bytes) || between_nodes.hold(bytes); }
  bool on(int nodes, uint64_t bytes) const {
    return nodes == 1 ? on_node.hold(bytes) : nodes <= most_nodes && between_nodes.hold(bytes);
  }
};

constexpr uint64_t kAny = UINT64_MAX;
constexpr Sizes kNever{kAny, 0};
constexpr Sizes kAlways{0, kAny};
constexpr uint64_t kGradientBytes = 16 << 10;
constexpr Worthwhile kReductions{kAlways, kAlways, 1024, true};
constexpr Worthwhile kScatteredReductions{kAlways, {1 << 20, kAny}, 8, false};
// From 64 KiB on Open MPI copies once, from process to process, and hsgd twice.
constexpr uint64_t kMostCopiedTwice = (64 << 10) - 1;
constexpr Worthwhile kBroadcasts{{0, kMostCopiedTwice}, {256 << 10, kAny}, 64, false};
constexpr Worthwhile kGathers{{8 << 10, kMostCopiedTwice}, {1 << 20, kAny}, 8, false};
constexpr Worthwhile kUserReductions{{0, 32 << 10}, kNever, 1, false};

struct Payload {
  uint64_t bytes;
  const void* in;
  const void* out;
};

// Runs body(comm, &error), which returns a hsgd_status, if the payload is worth it and hsgd has a
// communicator. With HSGD_MIN_BYTES=0 every payload is worth it. Buffers in device memory are never
// taken.
template <class Body>
Taken take(Collective collective, MPI_Comm comm, const Payload& payload,
           const Worthwhile& worthwhile, Body&& body) {
  const uint64_t bytes = payload.bytes;
  const hsgd_options* options = settings();
  if (options == nullptr || comm == MPI_COMM_NULL || bytes == 0 || bytes < options->min_bytes)
    return pass(collective, bytes);
  const bool all = options->min_bytes == 0;
  if (!all && !worthwhile.somewhere(bytes)) return pass(collective, bytes);
  if (is_revoked(comm)) return pass(collective, bytes);  // MPI reports that
  const TakenCall taken(comm);
  hsgd_comm* core = nullptr;
  hsgd_error error;
  const bool recurs = comm == MPI_COMM_WORLD || bytes >= kGradientBytes;
  const bool at_once = all || (worthwhile.gradients_at_once && recurs);
  int code = communicator_of(comm, *options, bytes, at_once, &core, &error);
  if (code == HSGD_OK) {
    if (core == nullptr) return pass(collective, bytes);
    if (!all && !worthwhile.on(nodes_of(core), bytes)) return pass(collective, bytes);
    if (is_on_device(payload.out) || (payload.in != payload.out && is_on_device(payload.in)))
      return pass(collective, bytes);
    try {
      code = body(core, &error);
    } catch (const std::bad_alloc&) {
      describe("no memory to pack data that is not contiguous", &error);
      code = HSGD_ERR_MEMORY;
    } catch (const std::exception& failure) {
      describe(failure.what(), &error);
      code = HSGD_ERR_SYSTEM;
    }
  }
  if (code != HSGD_OK) return fail(comm, error);
  count_taken(collective, bytes);
  return MPI_SUCCESS;
}

// The core's kernel for a reduction, if it has one.
struct Kernel {
  hsgd_dtype dtype;
  hsgd_op op;
  uint64_t size;  // bytes of an element
};

std::optional<Kernel> kernel_of(const Reduction& call) {
  const std::optional<hsgd_op> op = known_op(call.op);
  if (!op) return std::nullopt;
  const std::optional<hsgd_dtype> dtype = known_dtype(call.type);
  if (!dtype) return std::nullopt;
  // An error that MPI reports on this rank alone; the others wait as they would without hsgd.
  if (call.out == MPI_IN_PLACE) return std::nullopt;
  return Kernel{*dtype, *op, hsgd_dtype_bytes(*dtype)};
}

// Returns the elements of all ranks; nothing if MPI must report an error in them.
template <class Number>
std::optional<uint64_t> total_of(const Number* counts, int ranks) {
  if (counts == nullptr || ranks <= 0) return std::nullopt;
  uint64_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (counts[rank] < 0) return std::nullopt;
    total += static_cast<uint64_t>(counts[rank]);
  }
  return total;
}

bool is_intercommunicator(MPI_Comm comm) {
  int inter = 0;
  return PMPI_Comm_test_inter(comm, &inter) == MPI_SUCCESS && inter != 0;
}

// `counts`: elements of the block of each rank.
int reduce_scatter(hsgd_comm* core, const Reduction& call, const Kernel& kernel,
                   const std::vector<uint64_t>& counts, hsgd_error* error) {
  if (call.in != MPI_IN_PLACE) {
    return hsgd_comm_reduce_scatter(core, call.in, call.out, counts.data(), kernel.dtype, kernel.op,
                                    nullptr, error);
  }
  // In place the block goes to the front of the input, which peers may still be reading.
  const uint64_t own_bytes = counts[static_cast<size_t>(rank_of(core))] * kernel.size;
  const Staging block = stage(own_bytes);
  const int code = hsgd_comm_reduce_scatter(core, call.out, block.get(), counts.data(),
                                            kernel.dtype, kernel.op, nullptr, error);
  if (code == HSGD_OK && own_bytes > 0) std::memcpy(call.out, block.get(), own_bytes);
  return code;
}

// The places of the ranks' blocks, in bytes of data and in elements of the receive buffer.
struct Blocks {
  std::vector<uint64_t> bytes;
  std::vector<int64_t> places;  // from the start of the receive buffer, in extents
};

bool lie_in_order(const Blocks& blocks, const TypeLayout& layout) {
  if (!layout.is_packed) return false;
  int64_t end = 0;
  for (size_t rank = 0; rank < blocks.bytes.size(); ++rank) {
    if (blocks.bytes[rank] == 0) continue;
    if (blocks.places[rank] * layout.extent != end) return false;
    end += static_cast<int64_t>(blocks.bytes[rank]);
  }
  return true;
}

int allgather(hsgd_comm* core, const Gathering& call, Blocks blocks, hsgd_error* error) {
  const TypeLayout layout = layout_of(call.out_type);
  const auto me = static_cast<size_t>(rank_of(core));
  const bool in_place = call.in == MPI_IN_PLACE;
  const auto at = [&](size_t rank) {
    return static_cast<std::byte*>(call.out) + blocks.places[rank] * layout.extent;
  };
  const auto elements = [&](size_t rank) {
    return layout.size > 0 ? blocks.bytes[rank] / layout.size : 0;
  };
  uint64_t before = 0;  // bytes in front of this rank's block
  uint64_t total = 0;
  for (size_t rank = 0; rank < blocks.bytes.size(); ++rank) {
    if (rank == me) before = total;
    total += blocks.bytes[rank];
  }
  const bool direct = lie_in_order(blocks, layout);
  const Staging gathered = direct ? nullptr : stage(total);
  std::byte* const out = direct ? static_cast<std::byte*>(call.out) : gathered.get();
  const void* in = out + before;
  Staging packed;
  if (in_place) {
    if (!direct) pack(at(me), elements(me), layout, out + before);
  } else {
    const TypeLayout own = layout_of(call.type);
    const uint64_t bytes = static_cast<uint64_t>(call.count) * own.size;
    in = call.in;
    if (!own.is_packed) {
      packed = stage(bytes);
      pack(call.in, static_cast<uint64_t>(call.count), own, packed.get());
      in = packed.get();
    }
    blocks.bytes[me] = bytes;  // if other ranks expect another size, all ranks get an error
  }
  const int code =
      hsgd_comm_allgather(core, in, out, blocks.bytes.data(), HSGD_UINT8, nullptr, error);
  if (code != HSGD_OK || direct) return code;
  const std::byte* from = out;
  for (size_t rank = 0; rank < blocks.bytes.size(); ++rank) {
    if (!(in_place && rank == me)) unpack(from, at(rank), elements(rank), layout);
    from += blocks.bytes[rank];
  }
  return code;
}

// Returns false for errors that MPI reports by itself.
bool is_valid(const Gathering& call) {
  if (call.out == MPI_IN_PLACE) return false;
  return call.in == MPI_IN_PLACE || (call.count >= 0 && call.type != MPI_DATATYPE_NULL);
}

// MPI allows a different user op on each rank here, so only the size decides.
Taken take_user_allreduce(const Reduction& call, MPI_Count count) {
  const std::optional<uint64_t> size = size_of(call.type);
  if (!size || call.out == MPI_IN_PLACE || count > INT_MAX) return pass(Collective::kAllreduce, 0);
  const auto elements = static_cast<uint64_t>(count);
  const uint64_t bytes = elements * *size;
  constexpr uint64_t kMostGathered = 128 << 10;  // each rank folds the data of all
  const hsgd_options* options = settings();
  const bool all = options != nullptr && options->min_bytes == 0;
  if (!all && bytes > kMostGathered / static_cast<uint64_t>(std::max(1, ranks_of(call.comm))))
    return pass(Collective::kAllreduce, bytes);
  return take(Collective::kAllreduce, call.comm, {bytes, call.in, call.out}, kUserReductions,
              [&](hsgd_comm* core, hsgd_error* error) {
                return allreduce_by_user_op(core, call.in, call.out, elements, call.type, call.op,
                                            error);
              });
}

}  // namespace

Taken take_allreduce(const Reduction& call, MPI_Count count) {
  if (count <= 0) return pass(Collective::kAllreduce, 0);
  const std::optional<Kernel> kernel = kernel_of(call);
  if (!kernel && is_user_op(call.op)) return take_user_allreduce(call, count);
  if (!kernel) return pass(Collective::kAllreduce, 0);
  const auto elements = static_cast<uint64_t>(count);
  const uint64_t bytes = elements * kernel->size;
  return take(Collective::kAllreduce, call.comm, {bytes, call.in, call.out}, kReductions,
              [&](hsgd_comm* core, hsgd_error* error) {
                const void* in = call.in == MPI_IN_PLACE ? call.out : call.in;
                return hsgd_comm_allreduce(core, in, call.out, elements, kernel->dtype, kernel->op,
                                           nullptr, error);
              });
}

Taken take_bcast(void* data, MPI_Count count, MPI_Datatype type, int root, MPI_Comm comm) {
  const std::optional<uint64_t> size = size_of(type);
  if (!size || count < 0 || root < 0 || root >= ranks_of(comm)) return pass(Collective::kBcast, 0);
  const auto elements = static_cast<uint64_t>(count);
  const uint64_t bytes = elements * *size;
  return take(Collective::kBcast, comm, {bytes, data, data}, kBroadcasts,
              [&](hsgd_comm* core, hsgd_error* error) {
                const TypeLayout layout = layout_of(type);
                if (layout.is_packed)
                  return hsgd_comm_broadcast(core, data, bytes, HSGD_UINT8, root, nullptr, error);
                const Staging packed = stage(bytes);
                const bool sends = rank_of(core) == root;
                if (sends) pack(data, elements, layout, packed.get());
                const int code = hsgd_comm_broadcast(core, packed.get(), bytes, HSGD_UINT8, root,
                                                     nullptr, error);
                if (code == HSGD_OK && !sends) unpack(packed.get(), data, elements, layout);
                return code;
              });
}

// A barrier has no payload to show whether the set-up of a communicator pays off: it takes the
// two-level path if another collective has created one. Between nodes MPI's barrier is faster.
Taken take_barrier(MPI_Comm comm) {
  if (settings() == nullptr || comm == MPI_COMM_NULL) return pass(Collective::kBarrier, 0);
  hsgd_comm* core = known_communicator_of(comm);
  if (core == nullptr || !(on_one_node(core) || settings()->min_bytes == 0))
    return pass(Collective::kBarrier, 0);
  if (is_revoked(comm)) return pass(Collective::kBarrier, 0);
  const TakenCall taken(comm);
  hsgd_error error;
  if (hsgd_comm_barrier(core, &error) != HSGD_OK) return fail(comm, error);
  count_taken(Collective::kBarrier, 0);
  return MPI_SUCCESS;
}

Taken take_allgather(const Gathering& call, MPI_Count out_count) {
  const std::optional<uint64_t> size = size_of(call.out_type);
  const int ranks = ranks_of(call.comm);
  if (!size || out_count < 0 || ranks == 0 || !is_valid(call))
    return pass(Collective::kAllgather, 0);
  const uint64_t block_bytes = static_cast<uint64_t>(out_count) * *size;
  const uint64_t bytes = block_bytes * static_cast<uint64_t>(ranks);
  return take(Collective::kAllgather, call.comm, {bytes, call.in, call.out}, kGathers,
              [&](hsgd_comm* core, hsgd_error* error) {
                Blocks blocks;
                for (int rank = 0; rank < ranks; ++rank) {
                  blocks.bytes.push_back(block_bytes);
                  blocks.places.push_back(static_cast<int64_t>(rank) * out_count);
                }
                return allgather(core, call, std::move(blocks), error);
              });
}

template <class Number, class Displacement>
Taken take_allgatherv(const Gathering& call, const Number* counts, const Displacement* places) {
  const std::optional<uint64_t> size = size_of(call.out_type);
  const int ranks = ranks_of(call.comm);
  // On an intercommunicator there are as many counts as ranks in the other group.
  if (!size || ranks == 0 || is_intercommunicator(call.comm) || !is_valid(call))
    return pass(Collective::kAllgatherv, 0);
  const std::optional<uint64_t> total = total_of(counts, ranks);
  if (!total || places == nullptr) return pass(Collective::kAllgatherv, 0);
  return take(Collective::kAllgatherv, call.comm, {*total * *size, call.in, call.out}, kGathers,
              [&](hsgd_comm* core, hsgd_error* error) {
                Blocks blocks;
                for (int rank = 0; rank < ranks; ++rank) {
                  blocks.bytes.push_back(static_cast<uint64_t>(counts[rank]) * *size);
                  blocks.places.push_back(static_cast<int64_t>(places[rank]));
                }
                return allgather(core, call, std::move(blocks), error);
              });
}

template <class Number>
Taken take_reduce_scatter(const Reduction& call, const Number* counts) {
  const std::optional<Kernel> kernel = kernel_of(call);
  const int ranks = ranks_of(call.comm);
  if (!kernel || ranks == 0 || is_intercommunicator(call.comm))
    return pass(Collective::kReduceScatter, 0);
  const std::optional<uint64_t> total = total_of(counts, ranks);
  if (!total) return pass(Collective::kReduceScatter, 0);
  const uint64_t bytes = *total * kernel->size;
  return take(Collective::kReduceScatter, call.comm, {bytes, call.in, call.out},
              kScatteredReductions, [&](hsgd_comm* core, hsgd_error* error) {
                return reduce_scatter(core, call, *kernel,
                                      std::vector<uint64_t>(counts, counts + ranks), error);
              });
}

Taken take_reduce_scatter_block(const Reduction& call, MPI_Count count) {
  const std::optional<Kernel> kernel = kernel_of(call);
  const int ranks = ranks_of(call.comm);
  if (!kernel || count < 0 || ranks == 0) return pass(Collective::kReduceScatterBlock, 0);
  const auto elements = static_cast<uint64_t>(count);
  const uint64_t bytes = elements * static_cast<uint64_t>(ranks) * kernel->size;
  return take(Collective::kReduceScatterBlock, call.comm, {bytes, call.in, call.out},
              kScatteredReductions, [&](hsgd_comm* core, hsgd_error* error) {
                const std::vector<uint64_t> counts(static_cast<size_t>(ranks), elements);
                return reduce_scatter(core, call, *kernel, counts, error);
              });
}

template Taken take_allgatherv(const Gathering&, const int*, const int*);
template Taken take_reduce_scatter(const Reduction&, const int*);
#if MPI_VERSION >= 4
template Taken take_allgatherv(const Gathering&, const MPI_Count*, const MPI_Aint*);
template Taken take_reduce_scatter(const Reduction&, const MPI_Count*);
#endif

}  // namespace hsgd::pmpi
