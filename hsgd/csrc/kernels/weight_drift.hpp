// How far float32 weights in host memory have moved: the square of a difference, in one pass.
//
// Owns the loop. Never allocates, and never changes what it reads. The result does not depend on
// the instruction set: it is summed in lanes of a fixed number, and in double over runs of them.
//
// Source: the relative change of adaptive gossip, Ho, Wu, Liu, CCGRID 2018, after its abstract.
#ifndef HSGD_KERNELS_WEIGHT_DRIFT_HPP_
#define HSGD_KERNELS_WEIGHT_DRIFT_HPP_

#include <cstdint>

namespace hsgd {

// The sum of (now[i] - last[i])^2.
using ChangeFn = double (*)(const float* now, const float* last, uint64_t count);

ChangeFn choose_change();

}  // namespace hsgd

#endif  // HSGD_KERNELS_WEIGHT_DRIFT_HPP_
