// The arithmetic of elastic averaging on float32 in host memory: difference, pull and push in one
// pass.
//
// Never allocates and never waits. The result does not depend on the instruction set, not even in
// the last bits of the sum of squares: it is summed in a fixed number of lanes.
//
// Source of the formulas: EASGD, Zhang, Choromanska, LeCun, arXiv:1412.6651, equations 5 and 6.
#ifndef HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_
#define HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_

#include <cstdint>

namespace hsgd {

// d = rate * (weights - centre), rounded to bfloat16 if `narrow` is not nullptr; weights -= d.
// Either d is written to `delta` or `narrow`, or centre + d is written to `next`; the other two are
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

// Returns the sum of (weights - centre)^2 before the pull.
using ElasticFn = double (*)(const ElasticArgs& args);

ElasticFn choose_elastic();

// Writes old + added to `next`, and to `also` unless it is nullptr: `count` values that do not
// overlap. For two inputs of a few KiB, the general sum of core/kernels/reduce.hpp takes a fifth
// longer.
using AddFn = void (*)(const float* old, const float* added, uint64_t count, float* next,
                       float* also);

AddFn choose_add();

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_ELASTIC_KERNELS_HPP_
