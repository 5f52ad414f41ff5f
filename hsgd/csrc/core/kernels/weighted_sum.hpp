// weighted_sum(): a checksum of words in host memory: the sum of word * weight, modulo 2^64.
//
// Never allocates. Memory bandwidth bounds it: wider registers gain little, so it is compiled only
// once, in its caller.
//
// Source: Lemire, Kaser, "Strongly universal string hashing is fast", arXiv:1202.4961
// (multilinear).
#ifndef HSGD_CORE_KERNELS_WEIGHTED_SUM_HPP_
#define HSGD_CORE_KERNELS_WEIGHTED_SUM_HPP_

#include <cstdint>

namespace hsgd {

// Local; never fails. Words are signed, like torch's int32 in a product with int64.
inline int64_t weighted_sum(const int32_t* words, const int64_t* weights, uint64_t count) {
  uint64_t sum = 0;  // unsigned: it may overflow
  for (uint64_t i = 0; i < count; ++i) {
    const auto word = static_cast<uint64_t>(static_cast<int64_t>(words[i]));
    sum += word * static_cast<uint64_t>(weights[i]);
  }
  return static_cast<int64_t>(sum);
}

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_WEIGHTED_SUM_HPP_
