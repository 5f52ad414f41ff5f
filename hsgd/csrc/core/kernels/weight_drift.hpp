// How far float32 weights in host memory have moved: the square of a difference, in one pass.
//
// Owns the loop. Never allocates, and never changes what it reads. The result does not depend on
// the instruction set: it is summed in lanes of a fixed number, and in double over runs of them.
//
// Source: the relative change of adaptive gossip, Ho, Wu, Liu, CCGRID 2018, after its abstract.
#ifndef HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_
#define HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_

#include <cstdint>
#include <vector>

#include "hsgd_core.h"

namespace hsgd {

// `rows` rows of `length` float32 elements at two places: in `last` they follow one another, in
// `now` each begins `stride` elements after the one before.
struct DriftPart {
  const float* now;
  const float* last;
  uint64_t rows;
  uint64_t length;
  uint64_t stride;
  double weight;  // of each element
};

// Local, never fails: the sum over parts of weight * |now - last|^2.
HSGD_API double drift_square(const std::vector<DriftPart>& parts);

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_
