// The reduction kernels for AVX-512 F, BW, DQ and VL. Compiled with -mavx512f -mavx512bw -mavx512dq
// -mavx512vl -mfma -mf16c; empty elsewhere.
#if defined(__x86_64__)

#include <immintrin.h>

#include "core/kernels/reduce_kernels.hpp"

namespace hsgd {
namespace {

struct Avx512 {
  static constexpr size_t kBytes = 64;

  using Halves = VectorOf<uint16_t, 32>::Type;
  using Words = VectorOf<uint32_t, 64>::Type;
  using Floats = VectorOf<float, 64>::Type;

  // Masked forms, because those without a mask cause a warning of an uninitialized register in GCC
  // 12.
  static constexpr __mmask16 kAll = 0xffff;
  static Words zero_extend(Halves half) {
    return bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(kAll, bit_cast<__m256i>(half)));
  }
  static Floats half_to_float(Halves half) {
    return bit_cast<Floats>(_mm512_maskz_cvtph_ps(kAll, bit_cast<__m256i>(half)));
  }
  static Halves float_to_half(Floats value) {
    return bit_cast<Halves>(
        _mm512_maskz_cvtps_ph(kAll, bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
  }

  template <typename S>
  static S load_part(const char* p, size_t bytes) {
    if constexpr (sizeof(S) == 64) {
      return bit_cast<S>(_mm512_maskz_loadu_epi8(first(bytes), p));
    } else {
      return bit_cast<S>(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(first(bytes)), p));
    }
  }
  template <typename S>
  static void store_part(char* p, S s, size_t bytes) {
    if constexpr (sizeof(S) == 64) {
      _mm512_mask_storeu_epi8(p, first(bytes), bit_cast<__m512i>(s));
    } else {
      _mm256_mask_storeu_epi8(p, static_cast<__mmask32>(first(bytes)), bit_cast<__m256i>(s));
    }
  }
  template <typename S>
  static void stream(char* p, S s) {
    if constexpr (sizeof(S) == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(s));
    } else {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bit_cast<__m256i>(s));
    }
  }
  static void fence() { _mm_sfence(); }

 private:
  static __mmask64 first(size_t bytes) { return (__mmask64{1} << bytes) - 1; }  // bytes < 64
};

}  // namespace

ReduceFn select_reduce_avx512(hsgd_dtype dtype, hsgd_op op) noexcept {
  return select<Avx512>(dtype, op);
}
Conversion select_conversion_avx512(hsgd_dtype narrow) noexcept {
  return select_conversion_of<Avx512>(narrow);
}
CopyFn select_copy_avx512() noexcept { return copy<Avx512>; }

}  // namespace hsgd

#endif  // __x86_64__
