// Reduction kernels for any processor: 16-byte vectors if the compiler has them, and integer
// arithmetic for float16.
#include "core/kernels/reduce_kernels.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hsgd {
namespace {

struct Plain : PartsByPieces {
  static constexpr size_t kBytes = 16;

  using Halves = VectorOf<uint16_t, 8>::Type;
  using Words = VectorOf<uint32_t, 16>::Type;
  using Floats = VectorOf<float, 16>::Type;

  static Words zero_extend(Halves half) { return __builtin_convertvector(half, Words); }

  // Subnormal halves are shifted into the fraction of 2^-14, then 2^-14 is subtracted. This is
  // exact, and needs no float32 subnormal, which the processor may flush to zero.
  static Floats half_to_float(Halves stored) {
    const Words half = zero_extend(stored);
    const Words magnitude = (half & 0x7fff) << 13;
    const Words exponent = magnitude & 0x0f800000;
    const Words normal = magnitude + (112u << 23);
    const Words special = magnitude + (224u << 23);
    const Floats shifted = bit_cast<Floats>(magnitude + (113u << 23));
    const Words subnormal = bit_cast<Words>(shifted - 0x1p-14f);
    const Words finite = exponent == 0 ? subnormal : normal;
    const Words bits = exponent == 0x0f800000 ? special : finite;
    return bit_cast<Floats>(bits | (half & 0x8000) << 16);
  }

  // Rounds to nearest even by adding integers, or floats if the result is subnormal: the last bit
  // of 0.5 is that of a subnormal half.
  static Halves float_to_half(Floats value) {
    const Words bits = bit_cast<Words>(value);
    const Words magnitude = bits & 0x7fffffff;
    const Words odd = (magnitude >> 13) & 1;
    const Words normal = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
    const Words subnormal = bit_cast<Words>(bit_cast<Floats>(magnitude) + 0.5f) - 0x3f000000;
    const Words infinity = Words{} + 0x7c00, nan = Words{} + 0x7e00;
    const Words finite = magnitude < 0x38800000 ? subnormal : normal;
    const Words number = magnitude < 0x477ff000 ? finite : infinity;
    const Words half = magnitude > 0x7f800000 ? nan : number;
    return __builtin_convertvector(half | (bits >> 16 & 0x8000), Halves);
  }

#if defined(__SSE2__)
  template <typename S>
  static void stream(char* p, S s) {
    if constexpr (sizeof(S) == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), bit_cast<__m128i>(s));
    } else {
      _mm_stream_si64(reinterpret_cast<long long*>(p), bit_cast<long long>(s));
    }
  }
  static void fence() { _mm_sfence(); }
#else
  // There is no portable non-temporal store; ordinary stores are correct, but slower.
  template <typename S>
  static void stream(char* p, S s) {
    store(p, s);
  }
  static void fence() {}
#endif
};

}  // namespace

ReduceFn select_reduce_plain(hsgd_dtype dtype, hsgd_op op) noexcept {
  return select<Plain>(dtype, op);
}
Conversion select_conversion_plain(hsgd_dtype narrow) noexcept {
  return select_conversion_of<Plain>(narrow);
}
CopyFn select_copy_plain() noexcept { return copy<Plain>; }

}  // namespace hsgd
