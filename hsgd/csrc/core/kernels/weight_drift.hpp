// drift_square(): measures how far float32 weights in host memory have moved, in one pass.
//
// Never allocates. The result does not depend on the instruction set: it is summed in a fixed
// number of lanes, and in double over runs of them.
//
// Source: the relative change of adaptive gossip, Ho, Wu, Liu, CCGRID 2018, after its abstract.
#ifndef HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_
#define HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_

#include <cstdint>
#include <vector>

#include "hsgd_core.h"

namespace hsgd {

// `rows` rows of `length` float32 elements in two arrays: in `last` the rows are contiguous, in
// `now` each row begins `stride` elements after the one before.
struct DriftPart {
  const float* now;
  const float* last;
  uint64_t rows;
  uint64_t length;
  uint64_t stride;
  double weight;  // of each element
};

// Local; never fails. Returns the sum over parts of weight * |now - last|^2.
HSGD_API double drift_square(const std::vector<DriftPart>& parts);

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_WEIGHT_DRIFT_HPP_
