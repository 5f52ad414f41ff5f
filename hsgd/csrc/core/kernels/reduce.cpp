// Chooses between the kernels of reduce_plain.cpp, reduce_avx2.cpp and reduce_avx512.cpp.
#include "core/kernels/reduce.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hsgd {

Isa detect_isa() noexcept {
#if defined(__x86_64__)
  // The built-in also checks that the system saves the wide registers; not all compilers know
  // "f16c".
  unsigned a, b, c, d;
  const bool half = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool avx2 = half && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPlain;
}

const char* isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
#if defined(__aarch64__)
      return "neon";  // the compiler's code for 16-byte vectors
#else
      return "plain";
#endif
  }
}

ReduceFn select_reduce(hsgd_dtype dtype, hsgd_op op, Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return select_reduce_avx512(dtype, op);
  if (isa == Isa::kAvx2) return select_reduce_avx2(dtype, op);
#endif
  static_cast<void>(isa);
  return select_reduce_plain(dtype, op);
}

Conversion select_conversion(hsgd_dtype narrow, Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return select_conversion_avx512(narrow);
  if (isa == Isa::kAvx2) return select_conversion_avx2(narrow);
#endif
  static_cast<void>(isa);
  return select_conversion_plain(narrow);
}

CopyFn select_copy(Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return select_copy_avx512();
  if (isa == Isa::kAvx2) return select_copy_avx2();
#endif
  static_cast<void>(isa);
  return select_copy_plain();
}

}  // namespace hsgd
