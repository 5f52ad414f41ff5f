// call_table: maps each kind of call to one collective or to two.
#include "collectives/queue/call_table.hpp"

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/collectives.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/error.hpp"
#include "core/base/status.hpp"

namespace hsgd {
namespace {

using Rows = std::vector<uint64_t>;

// Returns the name of the exchange of rows, so that errors distinguish it from that of the data.
std::string name_of_rows(const hsgd_label* label) {
  const bool named = label != nullptr && label->name != nullptr;
  return named ? std::string("rows of ") + label->name : "rows";
}

Rows in_elements(const uint64_t* rows, size_t ranks, uint64_t row_elements) {
  Rows counts(rows, rows + ranks);
  for (uint64_t& count : counts) {
    if (__builtin_mul_overflow(count, row_elements, &count)) count = UINT64_MAX;  // refused later
  }
  return counts;
}

void check_rows(const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  if (call.place == nullptr) throw_invalid("place is NULL");
}

void check_allgather_rows(const Place&, const hsgd_call& call) {
  check_rows(call);
  const uint64_t bytes =
      checked_bytes(in_elements(&call.count, 1, call.row_elements).front(), call.dtype);
  check_buffers({call.in, bytes}, {call.in, bytes}, "one");
}

void check_alltoall_rows(const Place& place, const hsgd_call& call) {
  check_rows(call);
  const Blocks sent = checked_blocks(place, call.counts, call.dtype, call.row_elements);
  check_buffers({call.in, sent.total}, {call.in, sent.total}, "one");
}

// Asks the caller for a place for the result and runs the collective into it. If there is no valid
// place, the error is thrown after the collective, so that the other ranks get their result.
template <class Check, class Run>
void run_into_place(Communicator& communicator, const hsgd_call& call, const Rows& rows,
                    uint64_t bytes, Check&& check, Run&& run) {
  hsgd_error refused{};
  void* out = call.place(call.context, rows.data(), &refused);
  if (refused.code == HSGD_OK) guarded(&refused, [&] { check(out); });
  if (refused.code == HSGD_OK) return run(out);
  const std::unique_ptr<std::byte[]> unseen(new (std::nothrow) std::byte[bytes]);
  if (unseen == nullptr) {
    const int rank = communicator.place().name();
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
  const Blocks blocks = checked_blocks(communicator.place(), counts.data(), call.dtype);
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
  const Blocks in = checked_blocks(communicator.place(), sent.data(), call.dtype);
  const Blocks out = checked_blocks(communicator.place(), received.data(), call.dtype);
  run_into_place(
      communicator, call, rows, out.total,
      [&](const void* data) { check_exchanged(in, out, call.in, data); },
      [&](void* data) {
        communicator.alltoall(call.in, sent.data(), data, received.data(), call.dtype, call.label);
      });
}

// A kind that consists of two collectives.
struct Composite {
  void (*check)(const Place&, const hsgd_call&);
  void (*execute)(Communicator&, const hsgd_call&);
};

const Composite* composite_of(hsgd_kind kind) {
  static constexpr Composite kAllgatherRows{check_allgather_rows, run_allgather_rows};
  static constexpr Composite kAlltoallRows{check_alltoall_rows, run_alltoall_rows};
  if (kind == HSGD_ALLGATHER_ROWS) return &kAllgatherRows;
  return kind == HSGD_ALLTOALL_ROWS ? &kAlltoallRows : nullptr;
}

}  // namespace

void check_call(const Communicator& communicator, const hsgd_call& call) {
  if (call.kind == HSGD_FUNCTION) {
    if (call.function == nullptr) throw_invalid("function is NULL");
    return;
  }
  if (const CollectiveKind* kind = kind_of(call.kind)) {
    return kind->check(communicator.place(), call);
  }
  const Composite* composite = composite_of(call.kind);
  if (composite == nullptr) throw_invalid("unknown kind %d", static_cast<int>(call.kind));
  composite->check(communicator.place(), call);
}

void execute_call(Communicator& communicator, const hsgd_call& call) {
  if (const Composite* composite = composite_of(call.kind)) {
    return composite->execute(communicator, call);
  }
  communicator.run(call);
}

}  // namespace hsgd
