// The arithmetic of elastic averaging on float32 in host memory: difference, pull and push in one
// pass.
//
// Owns the loops. Never allocates, waits or knows who owns the memory. The result does not depend
// on the instruction set, but for the last bits of the sum of squares, which does not either: it is
// summed in lanes of a fixed number.
//
// Source of the formulas: EASGD, Zhang, Choromanska, LeCun, arXiv:1412.6651, equations 5 and 6.
#ifndef HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_
#define HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_

#include <cstdint>

namespace hsgd {

// d = rate * (weights - centre), rounded to bfloat16 where `narrow` is given;
// weights -= d; and d goes to one of delta and narrow, or centre + d to next: the others are
// nullptr. Arrays of `count` values that do not overlap.
struct ElasticArgs {
  const float* centre;
  float* weights;
  float* delta;
  uint16_t* narrow;
  float* next;
  uint64_t count;
  float rate;
};

// The sum of (weights - centre)^2 before the pull.
using ElasticFn = double (*)(const ElasticArgs& args);

ElasticFn choose_elastic();

// next = old + added, and `also` too unless it is nullptr: `count` values that do not overlap. The
// sum of core/kernels/reduce.hpp, for any number of inputs, takes a fifth longer for two of a few
// KiB.
using AddFn = void (*)(const float* old, const float* added, uint64_t count, float* next,
                       float* also);

AddFn choose_add();

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_
