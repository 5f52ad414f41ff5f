// The dtypes and ops that the core knows: names, sizes, and which go together.
//
// Owns these facts and the checks of a caller's codes and counts. Never does arithmetic on data.
#ifndef HSGD_CORE_BASE_DTYPES_HPP_
#define HSGD_CORE_BASE_DTYPES_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// Throws HSGD_ERR_ARGUMENT for unknown codes, and for a mean of integers.
void check_type(hsgd_dtype dtype, hsgd_op op);
// The bytes of `count` elements of a valid dtype; throws where they are too many to address.
uint64_t checked_bytes(uint64_t count, hsgd_dtype dtype);

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_DTYPES_HPP_
