// One step of LARS on float32 tensors in host memory: norms and update, layer by layer.
//
// Owns trust ratios and how a step is divided among threads. Never allocates tensors, keeps state
// or communicates. A layer of up to kPiece elements is still in the cache when it is updated;
// larger ones are cut into pieces, and the norm of their weights is summed while they are updated,
// for the next step. The result depends neither on the number of threads nor on the instruction
// set: norms are summed in double over pieces of a fixed size, in order.
//
// Source of the formulas: You, Gitman, Ginsburg, arXiv:1708.03888, and the implementations that
// hsgd/optim/large_batch/lars.py names.
#ifndef HSGD_KERNELS_LARS_HPP_
#define HSGD_KERNELS_LARS_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

constexpr uint64_t kPiece = 64 * 1024;  // elements: two arrays of it fit in a second-level cache

// Updates weights and buffers in place. Tensors overlap only as gradient and gradient. `threads`
// includes the caller; fewer are used when there is little to do.
void lars_step(hsgd_lars_tensor* tensors, uint64_t count, const hsgd_lars_rule& rule, int threads);

}  // namespace hsgd

#endif  // HSGD_KERNELS_LARS_HPP_
