// Sums of squares and updates of LARS over a run of float32 elements.
//
// The loops are built once per instruction set; all builds sum in the same order. They know no
// tensors, no norms of whole tensors and no threads.
#ifndef HSGD_CORE_KERNELS_LARS_KERNELS_HPP_
#define HSGD_CORE_KERNELS_LARS_KERNELS_HPP_

#include <cstdint>

namespace hsgd {

// Numbers of a rule for one tensor, after its trust ratio is known:
// d = scale * (g + decay * w); v = momentum * v + d; w -= rate * (nesterov ? momentum * v + d : v).
struct LarsStep {
  float decay = 0;
  float scale = 1;
  float momentum = 0;
  float rate = 0;
  bool nesterov = false;
};

struct LarsPiece {
  float* w;
  const float* g;
  float* v;  // nullptr without momentum
  uint64_t count;
};

// Squares of |w| before and after an update.
struct LarsSquares {
  double before = 0;
  double after = 0;
};

// The value that is squared.
enum class LarsValue {
  kWeight,    // w
  kGradient,  // g
  kDecayed,   // g + decay * w
  kMoved      // that value after momentum
};

struct LarsKernels {
  double (*square)(LarsValue of, const LarsPiece& piece, const LarsStep& step);
  void (*update)(const LarsPiece& piece, const LarsStep& step);
  // Does the same update; the squares have the bits of square(kWeight) before and after it.
  LarsSquares (*update_and_sum)(const LarsPiece& piece, const LarsStep& step);
};

// Returns the kernels for this processor.
LarsKernels lars_kernels();

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_LARS_KERNELS_HPP_
