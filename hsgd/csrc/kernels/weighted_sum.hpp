// A checksum of words in host memory: the sum of each times its weight, modulo 2^64.
//
// Owns the loop. Never allocates, and never changes what it reads.
//
// Source: Lemire, Kaser, "Strongly universal string hashing is fast", arXiv:1202.4961
// (multilinear).
#ifndef HSGD_KERNELS_WEIGHTED_SUM_HPP_
#define HSGD_KERNELS_WEIGHTED_SUM_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// Local, never fails. Words count with their signs, as torch's int32 in a product with int64.
HSGD_API int64_t weighted_sum(const int32_t* words, const int64_t* weights, uint64_t count);

}  // namespace hsgd

#endif  // HSGD_KERNELS_WEIGHTED_SUM_HPP_
