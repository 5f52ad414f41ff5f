// Loops, compiled once per instruction set. Products and sums are not fused (-ffp-contract=off), so
// all instruction sets give the same bits.
#include "core/kernels/elastic_kernels.hpp"

#include <cstring>

#include "core/base/float_mode.hpp"
#include "core/kernels/reduce.hpp"
#include "core/kernels/square_sums.hpp"

namespace hsgd {
namespace {

// Rounds to nearest even. A NaN keeps its sign and becomes quiet; rounding it would give infinity.
[[gnu::always_inline]] inline uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

[[gnu::always_inline]] inline float widened(uint16_t narrow) {
  const uint32_t bits = static_cast<uint32_t>(narrow) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <bool kDelta, bool kNarrow, bool kNext>
[[gnu::always_inline]] inline double run(const ElasticArgs& args) {
  const float* __restrict c = args.centre;
  float* __restrict w = args.weights;
  float* __restrict delta = args.delta;
  uint16_t* __restrict narrow = args.narrow;
  float* __restrict next = args.next;
  const float rate = args.rate;
  return sum_squares(args.count, [&](uint64_t at, float& sum) __attribute__((always_inline)) {
    const float difference = w[at] - c[at];
    sum += difference * difference;
    float d = rate * difference;
    if constexpr (kNarrow) {
      narrow[at] = narrowed(d);
      d = widened(narrow[at]);
    }
    if constexpr (kDelta) delta[at] = d;
    if constexpr (kNext) next[at] = c[at] + d;
    w[at] -= d;
  });
}

[[gnu::always_inline]] inline double elastic_in(const ElasticArgs& args) {
  const PlainFloats mode;
  if (args.next != nullptr) return run<false, false, true>(args);
  return args.narrow != nullptr ? run<false, true, false>(args) : run<true, false, false>(args);
}

[[gnu::always_inline]] inline void add_in(const float* __restrict old,
                                          const float* __restrict added, uint64_t count,
                                          float* __restrict next, float* __restrict also) {
  const PlainFloats mode;
  if (also == nullptr) {
    for (uint64_t i = 0; i < count; ++i) next[i] = old[i] + added[i];
  } else {
    for (uint64_t i = 0; i < count; ++i) also[i] = next[i] = old[i] + added[i];
  }
}

double elastic_plain(const ElasticArgs& args) { return elastic_in(args); }
void add_plain(const float* old, const float* added, uint64_t count, float* next, float* also) {
  add_in(old, added, count, next, also);
}

#if defined(__x86_64__)
#define HSGD_BOX_AVX2 [[gnu::target("avx2")]]
#define HSGD_BOX_AVX512 \
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]
HSGD_BOX_AVX2 double elastic_avx2(const ElasticArgs& args) { return elastic_in(args); }
HSGD_BOX_AVX512 double elastic_avx512(const ElasticArgs& args) { return elastic_in(args); }
HSGD_BOX_AVX2 void add_avx2(const float* old, const float* added, uint64_t count, float* next,
                            float* also) {
  add_in(old, added, count, next, also);
}
HSGD_BOX_AVX512 void add_avx512(const float* old, const float* added, uint64_t count, float* next,
                                float* also) {
  add_in(old, added, count, next, also);
}
#endif

}  // namespace

ElasticFn choose_elastic() {
#if defined(__x86_64__)
  const Isa isa = detect_isa();
  if (isa == Isa::kAvx512) return elastic_avx512;
  if (isa == Isa::kAvx2) return elastic_avx2;
#endif
  return elastic_plain;
}

AddFn choose_add() {
#if defined(__x86_64__)
  const Isa isa = detect_isa();
  if (isa == Isa::kAvx512) return add_avx512;
  if (isa == Isa::kAvx2) return add_avx2;
#endif
  return add_plain;
}

}  // namespace hsgd
