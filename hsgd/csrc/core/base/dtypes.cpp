// Table of dtypes and ops.
#include "core/base/dtypes.hpp"

#include "core/base/error.hpp"

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

}  // namespace

void check_type(hsgd_dtype dtype, hsgd_op op) {
  if (!valid(dtype)) throw_invalid("unknown dtype code %d", static_cast<int>(dtype));
  if (!valid(op)) throw_invalid("unknown op code %d", static_cast<int>(op));
  if (op == HSGD_MEAN && !kDtypes[dtype].floating) {
    throw_invalid("mean of %s is not supported; use sum and divide, or a floating-point dtype",
                  kDtypes[dtype].name);
  }
}

uint64_t checked_bytes(uint64_t count, hsgd_dtype dtype) {
  if (count > UINT64_MAX / 16) {
    throw_invalid("%llu elements are too many", static_cast<unsigned long long>(count));
  }
  return count * kDtypes[dtype].bytes;
}

}  // namespace hsgd

size_t hsgd_dtype_bytes(hsgd_dtype dtype) {
  return hsgd::valid(dtype) ? hsgd::kDtypes[dtype].bytes : 0;
}

const char* hsgd_dtype_name(hsgd_dtype dtype) {
  return hsgd::valid(dtype) ? hsgd::kDtypes[dtype].name : "unknown dtype";
}

const char* hsgd_op_name(hsgd_op op) { return hsgd::valid(op) ? hsgd::kOps[op] : "unknown op"; }
