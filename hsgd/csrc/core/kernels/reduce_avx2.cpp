// The reduction kernels for AVX2 and F16C. Compiled with -mavx2 -mfma -mf16c; empty elsewhere.
#if defined(__x86_64__)

#include <immintrin.h>

#include "core/kernels/reduce_kernels.hpp"

namespace hsgd {
namespace {

struct Avx2 : PartsByPieces {
  static constexpr size_t kBytes = 32;

  using Halves = VectorOf<uint16_t, 16>::Type;
  using Words = VectorOf<uint32_t, 32>::Type;
  using Floats = VectorOf<float, 32>::Type;

  static Words zero_extend(Halves half) {
    return bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(half)));
  }
  static Floats half_to_float(Halves half) {
    return bit_cast<Floats>(_mm256_cvtph_ps(bit_cast<__m128i>(half)));
  }
  static Halves float_to_half(Floats value) {
    return bit_cast<Halves>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
  }

  template <typename V>
  static void stream(char* p, V v) {
    if constexpr (sizeof(V) == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(v));
    } else {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(v));
    }
  }
  static void fence() { _mm_sfence(); }
};

}  // namespace

ReduceFn select_reduce_avx2(hsgd_dtype dtype, hsgd_op op) noexcept {
  return select<Avx2>(dtype, op);
}
Conversion select_conversion_avx2(hsgd_dtype narrow) noexcept {
  return select_conversion_of<Avx2>(narrow);
}
CopyFn select_copy_avx2() noexcept { return copy<Avx2>; }

}  // namespace hsgd

#endif  // __x86_64__
