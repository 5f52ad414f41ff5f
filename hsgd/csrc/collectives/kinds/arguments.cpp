// Checks sizes and overlaps, and chooses kernels.
#include "collectives/kinds/arguments.hpp"

#include "core/base/dtypes.hpp"
#include "core/base/error.hpp"
#include "core/kernels/reduce.hpp"

namespace hsgd {

void check_buffers(const Buffer& in, const Buffer& out, const char* allowed) {
  if ((in.bytes > 0 && in.data == nullptr) || (out.bytes > 0 && out.data == nullptr))
    throw_invalid("a buffer is NULL");
  const auto a = reinterpret_cast<uintptr_t>(in.data);
  const auto b = reinterpret_cast<uintptr_t>(out.data);
  const bool apart = a + in.bytes <= b || b + out.bytes <= a || in.bytes == 0 || out.bytes == 0;
  const bool in_place = in.place != Buffer::kNowhere && a + in.place == b + out.place;
  if (apart || in_place) return;
  throw_invalid("input and output overlap; pass %s separate ones", allowed);
}

Blocks checked_blocks(const Place& place, const uint64_t* counts, hsgd_dtype dtype, uint64_t unit) {
  if (counts == nullptr) throw_invalid("counts is NULL");
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

Operation operation_of(const Context& context, const hsgd_call& call) {
  Operation operation;
  operation.label = call.label;
  operation.in = call.in;
  operation.out = call.out;
  operation.reduction.copy = context.copy();
  operation.reduction.element_bytes = hsgd_dtype_bytes(call.dtype);
  return operation;
}

// Sets field by field: copying a struct as a whole right after its parts were stored stalls.
Operation reduction_of(const Context& context, const hsgd_call& call) {
  Operation operation = operation_of(context, call);
  Reduction& reduction = operation.reduction;
  reduction.reduce = select_reduce(call.dtype, call.op, context.isa());
  if (call.op == HSGD_MEAN) reduction.divisor = static_cast<double>(context.place().size);
  const auto narrow = static_cast<hsgd_dtype>(context.options().wire_dtype);
  if (narrow != HSGD_FLOAT32 && call.dtype == HSGD_FLOAT32) {
    reduction.narrowing = {select_conversion(narrow, context.isa()),
                           select_reduce(narrow, call.op, context.isa())};
  }
  if (call.dtype == HSGD_FLOAT16 || call.dtype == HSGD_BFLOAT16) {
    reduction.widening = {select_conversion(call.dtype, context.isa()),
                          select_reduce(HSGD_FLOAT32, call.op, context.isa())};
  }
  return operation;
}

}  // namespace hsgd
