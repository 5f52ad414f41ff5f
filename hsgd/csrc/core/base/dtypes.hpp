// Checks of dtypes, ops and counts that a caller passes.
#ifndef HSGD_CORE_BASE_DTYPES_HPP_
#define HSGD_CORE_BASE_DTYPES_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// Throws HSGD_ERR_ARGUMENT for unknown codes, and for a mean of integers.
void check_type(hsgd_dtype dtype, hsgd_op op);
// Returns the bytes of `count` elements of a valid dtype. Throws if they are too many to address.
uint64_t checked_bytes(uint64_t count, hsgd_dtype dtype);

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_DTYPES_HPP_
