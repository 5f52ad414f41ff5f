// The table of collectives: check and execute.
#include "communicator/call_table.hpp"

#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "base/dtypes.hpp"
#include "base/error.hpp"
#include "base/status.hpp"

namespace hsgd {
namespace {

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

// The blocks of a packed buffer, in bytes.
struct Blocks {
  uint64_t before = 0;  // in front of this rank's
  uint64_t own = 0;
  uint64_t total = 0;
};

// `unit`: elements that one count stands for.
Blocks checked_blocks(const Communicator& communicator, const uint64_t* counts, hsgd_dtype dtype,
                      uint64_t unit = 1) {
  if (counts == nullptr) throw Error(HSGD_ERR_ARGUMENT, -1, "counts is NULL");
  const hsgd_topology place = communicator.topology();
  uint64_t count = 0;
  Blocks blocks;
  for (int rank = 0; rank < place.size; ++rank) {
    if (rank == place.rank) blocks.before = checked_bytes(count, dtype);
    checked_bytes(counts[rank], dtype);
    uint64_t elements = 0;
    if (__builtin_mul_overflow(counts[rank], unit, &elements)) elements = UINT64_MAX;
    checked_bytes(elements, dtype);
    count += elements;
    blocks.total = checked_bytes(count, dtype);
    if (rank == place.rank) blocks.own = blocks.total - blocks.before;
  }
  return blocks;
}

// --- sizes that all ranks know ---

void check_allreduce(const Communicator&, const hsgd_call& call) {
  check_type(call.dtype, call.op);
  const uint64_t bytes = checked_bytes(call.count, call.dtype);
  check_buffers({call.in, bytes}, {call.out, bytes}, "the same buffer or");
}

void check_broadcast(const Communicator& communicator, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  const uint64_t bytes = checked_bytes(call.count, call.dtype);
  check_buffers({call.out, bytes}, {call.out, bytes}, "one");
  const int size = communicator.topology().size;
  if (call.root < 0 || call.root >= size || call.root > kMaxRoot) {
    throw Error(HSGD_ERR_ARGUMENT, call.root,
                text("broadcast: root %d is not a rank; ranks are 0 to %d", call.root, size - 1));
  }
}

void check_reduce_scatter(const Communicator& communicator, const hsgd_call& call) {
  check_type(call.dtype, call.op);
  const Blocks blocks = checked_blocks(communicator, call.counts, call.dtype);
  check_buffers({call.in, blocks.total, blocks.before}, {call.out, blocks.own},
                "this rank's block of the input as output, or");
}

void check_gathered(const Blocks& blocks, const void* in, const void* out) {
  check_buffers({in, blocks.own}, {out, blocks.total, blocks.before},
                "this rank's block of the output as input, or");
}

void check_allgather(const Communicator& communicator, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  check_gathered(checked_blocks(communicator, call.counts, call.dtype), call.in, call.out);
}

void check_exchanged(const Blocks& sent, const Blocks& received, const void* in, const void* out) {
  check_buffers({in, sent.total, kNowhere}, {out, received.total}, "two");
}

void check_alltoall(const Communicator& communicator, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  check_exchanged(checked_blocks(communicator, call.counts, call.dtype),
                  checked_blocks(communicator, call.receive_counts, call.dtype), call.in, call.out);
}

// --- rows that the ranks tell one another first ---

using Rows = std::vector<uint64_t>;

// Errors tell the exchange of rows from that of the data.
std::string name_of_rows(const hsgd_label* label) {
  const bool named = label != nullptr && label->name != nullptr;
  return named ? std::string("rows of ") + label->name : "rows";
}

Rows in_elements(const uint64_t* rows, size_t ranks, uint64_t row_elements) {
  Rows counts(rows, rows + ranks);
  for (uint64_t& count : counts) {
    if (__builtin_mul_overflow(count, row_elements, &count)) count = UINT64_MAX;  // is refused
  }
  return counts;
}

void check_rows(const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  if (call.place == nullptr) throw Error(HSGD_ERR_ARGUMENT, -1, "place is NULL");
}

void check_allgather_rows(const Communicator&, const hsgd_call& call) {
  check_rows(call);
  const uint64_t bytes =
      checked_bytes(in_elements(&call.count, 1, call.row_elements).front(), call.dtype);
  check_buffers({call.in, bytes}, {call.in, bytes}, "one");
}

void check_alltoall_rows(const Communicator& communicator, const hsgd_call& call) {
  check_rows(call);
  const Blocks sent = checked_blocks(communicator, call.counts, call.dtype, call.row_elements);
  check_buffers({call.in, sent.total}, {call.in, sent.total}, "one");
}

// Asks where the result goes and runs the collective into it. A place that is refused, or that
// `check` refuses, is told when the collective is done, so that the other ranks have theirs.
template <class Check, class Run>
void run_into_place(Communicator& communicator, const hsgd_call& call, const Rows& rows,
                    uint64_t bytes, Check&& check, Run&& run) {
  hsgd_error refused{};
  void* out = call.place(call.context, rows.data(), &refused);
  if (refused.code == HSGD_OK) guarded(&refused, [&] { check(out); });
  if (refused.code == HSGD_OK) return run(out);
  const std::unique_ptr<std::byte[]> unseen(new (std::nothrow) std::byte[bytes]);
  if (unseen == nullptr) {
    const int rank = communicator.topology().rank;
    communicator.abandon(Error(HSGD_ERR_MEMORY, rank,
                               text("rank %d has no memory for a result of %llu bytes", rank,
                                    static_cast<unsigned long long>(bytes))));
  }
  run(unseen.get());
  throw Error(static_cast<hsgd_status>(refused.code), refused.rank, refused.message);
}

void run_allgather_rows(Communicator& communicator, const hsgd_call& call) {
  const auto size = static_cast<size_t>(communicator.topology().size);
  const std::string name = name_of_rows(call.label);
  const hsgd_label label{name.c_str(), nullptr, 0};
  const Rows ones(size, 1);
  Rows rows(size);
  communicator.allgather(&call.count, rows.data(), ones.data(), HSGD_INT64, &label);
  const Rows counts = in_elements(rows.data(), size, call.row_elements);
  const Blocks blocks = checked_blocks(communicator, counts.data(), call.dtype);
  run_into_place(
      communicator, call, rows, blocks.total,
      [&](const void* out) { check_gathered(blocks, call.in, out); },
      [&](void* out) {
        communicator.allgather(call.in, out, counts.data(), call.dtype, call.label);
      });
}

void run_alltoall_rows(Communicator& communicator, const hsgd_call& call) {
  const auto size = static_cast<size_t>(communicator.topology().size);
  const std::string name = name_of_rows(call.label);
  const hsgd_label label{name.c_str(), nullptr, 0};
  const Rows ones(size, 1);
  Rows rows(size);
  communicator.alltoall(call.counts, ones.data(), rows.data(), ones.data(), HSGD_INT64, &label);
  const Rows sent = in_elements(call.counts, size, call.row_elements);
  const Rows received = in_elements(rows.data(), size, call.row_elements);
  const Blocks in = checked_blocks(communicator, sent.data(), call.dtype);
  const Blocks out = checked_blocks(communicator, received.data(), call.dtype);
  run_into_place(
      communicator, call, rows, out.total,
      [&](const void* data) { check_exchanged(in, out, call.in, data); },
      [&](void* data) {
        communicator.alltoall(call.in, sent.data(), data, received.data(), call.dtype, call.label);
      });
}

// --- all ---

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
    {check_reduce_scatter,
     [](Communicator& communicator, const hsgd_call& call) {
       communicator.reduce_scatter(call.in, call.out, call.counts, call.dtype, call.op, call.label);
     }},
    {check_allgather,
     [](Communicator& communicator, const hsgd_call& call) {
       communicator.allgather(call.in, call.out, call.counts, call.dtype, call.label);
     }},
    {check_alltoall,
     [](Communicator& communicator, const hsgd_call& call) {
       communicator.alltoall(call.in, call.counts, call.out, call.receive_counts, call.dtype,
                             call.label);
     }},
    {check_allgather_rows, run_allgather_rows},
    {check_alltoall_rows, run_alltoall_rows},
};

}  // namespace

void check_call(const Communicator& communicator, const hsgd_call& call) {
  if (call.kind < 0 || call.kind >= HSGD_KIND_COUNT)
    throw Error(HSGD_ERR_ARGUMENT, -1, text("unknown kind %d", static_cast<int>(call.kind)));
  kCollectives[call.kind].check(communicator, call);
}

void execute_call(Communicator& communicator, const hsgd_call& call) {
  kCollectives[call.kind].execute(communicator, call);
}

}  // namespace hsgd
