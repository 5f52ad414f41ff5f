// Sums of squares and updates of LARS over a run of float32 elements.
//
// Owns the loops, one build of them per instruction set, and the order of sums, which is the same
// in all of them. Never knows tensors, norms of whole ones, or threads.
#ifndef HSGD_CORE_KERNELS_LARS_KERNELS_HPP_
#define HSGD_CORE_KERNELS_LARS_KERNELS_HPP_

#include <cstdint>

namespace hsgd {

// What is left of a rule for one tensor, once its trust ratio is known:
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

// What is squared.
enum class LarsValue {
  kWeight,    // w
  kGradient,  // g
  kDecayed,   // g + decay * w
  kMoved      // what momentum makes of that
};

struct LarsKernels {
  double (*square)(LarsValue of, const LarsPiece& piece, const LarsStep& step);
  void (*update)(const LarsPiece& piece, const LarsStep& step);
  // The same update; the squares have the bits of square(kWeight) before and after it.
  LarsSquares (*update_and_sum)(const LarsPiece& piece, const LarsStep& step);
};

// Those for this processor.
LarsKernels lars_kernels();

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_LARS_KERNELS_HPP_
