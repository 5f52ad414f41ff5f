// One step of LARS on float32 tensors in host memory: norms and update, layer by layer.
//
// Computes trust ratios and divides a step among threads. Never allocates tensors, keeps state or
// communicates. A layer of up to kPiece elements is still in the cache when it is updated. Larger
// layers are cut into pieces, and the norm of their weights is summed while they are updated, for
// the next step. The result depends neither on the number of threads nor on the instruction set:
// norms are summed in double over pieces of a fixed size, in order.
//
// Source of the formulas: You, Gitman, Ginsburg, arXiv:1708.03888, and the implementations that
// hsgd/optim/large_batch/lars.py names.
#ifndef HSGD_CORE_KERNELS_LARS_HPP_
#define HSGD_CORE_KERNELS_LARS_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// The quantity by which the trust ratio divides |weight|.
enum class LarsNorm {
  kGradient = 0,  // |g| + weight_decay * |w| + eps
  kDecayed = 1,   // |g + weight_decay * w| + eps
  kUpdate = 2,    // |update by momentum| + eps
};

// Hyperparameters of a step, and the variant of LARS; hsgd/optim/large_batch/lars.py explains them.
struct LarsRule {
  double lr;
  double momentum;
  double weight_decay;
  double trust_coefficient;
  double eps;
  bool adapt;  // false: the ratio is 1, and no norms are computed
  LarsNorm norm_of;
  bool lr_in_momentum;  // the buffer sums up lr * trust * g, not trust * g
  bool clip;            // the ratio becomes min(ratio / lr, 1)
  bool plain_at_zero;   // if a norm is 0: no decay either
  bool nesterov;
};

// A tensor: `count` float32 elements in each array, in the same order; `buffer` is nullptr without
// momentum. The last step on these weights left `square`, which is |weight|^2, and `sample`, the
// sum of a few elements; 0: not known. If `square` no longer fits the weights, the step notices it
// and corrects the update, except for rounding. Set it to 0 after any write to the weights to get
// the same bits too.
struct LarsTensor {
  float* weight;
  const float* gradient;
  float* buffer;
  uint64_t count;
  double square;
  uint64_t sample;
};

constexpr uint64_t kPiece = 64 * 1024;  // in elements: two arrays of it fit in a second-level cache

// Updates weights and buffers in place. Tensors must not overlap, except gradients with gradients.
// `threads` (1 or more) includes the caller; fewer are used if there is little to do.
HSGD_API void lars_step(LarsTensor* tensors, uint64_t count, const LarsRule& rule, int threads);

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_LARS_HPP_
