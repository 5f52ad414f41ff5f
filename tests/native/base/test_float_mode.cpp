// Kernels give the same bits whatever the caller's thread makes of subnormals and of rounding.
#include <cfenv>
#include <cstring>
#include <vector>

#include "core/base/float_mode.hpp"
#include "core/kernels/elastic_kernels.hpp"
#include "core/kernels/lars.hpp"
#include "core/kernels/reduce.hpp"
#include "core/kernels/weight_drift.hpp"
#include "support/check.hpp"

namespace {

constexpr uint64_t kCount = 200;  // whole vectors and a rest, on every instruction set

// As torch.set_flush_denormal(True) leaves the thread.
void set_flush(bool on) {
#if defined(__x86_64__)
  uint32_t mode;
  asm volatile("stmxcsr %0" : "=m"(mode) : : "memory");
  mode = on ? mode | 0x8040 : mode & ~0x8040U;
  asm volatile("ldmxcsr %0" : : "m"(mode) : "memory");
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  mode = on ? mode | 0x1080000 : mode & ~uint64_t{0x1080000};
  asm volatile("msr fpcr, %0" : : "r"(mode) : "memory");
#else
  static_cast<void>(on);
#endif
}

bool flushes() {
  volatile float small = 0x1p-149F;
  return small * 1.0F == 0.0F;
}

using Bytes = std::vector<unsigned char>;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The same with the modes of most programs, with subnormals flushed, and rounding upwards; the
// caller's mode is there again afterwards.
template <class Run>
void check_same(const Run& run) {
  const Bytes expected = run();
  set_flush(true);
  const bool could_flush = flushes();
  const Bytes flushed = run();
  CHECK_EQ(flushes(), could_flush);
  set_flush(false);
#if defined(__x86_64__) || defined(__aarch64__)
  CHECK(could_flush);
#endif
  std::fesetround(FE_UPWARD);
  const Bytes upwards = run();
  CHECK_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  CHECK(flushed == expected);
  CHECK(upwards == expected);
}

// Bits of subnormals and of small numbers, of elements of any size.
template <class T>
std::vector<T> small_values(unsigned seed) {
  std::vector<T> values(kCount);
  for (uint64_t i = 0; i < kCount; ++i) {
    uint64_t bits = (i * 2654435761U + seed) % 0x7f;
    if (sizeof(T) == 4) bits = bits << 17 | (bits + seed);
    if (sizeof(T) == 8) bits = bits << 46 | (bits + seed);
    std::memcpy(&values[i], &bits, sizeof(T));
  }
  return values;
}

template <class T>
void check_reduce(hsgd_dtype dtype) {
  const std::vector<T> a = small_values<T>(1);
  const std::vector<T> b = small_values<T>(77);
  const void* inputs[] = {a.data(), b.data()};
  for (int isa = 0; isa <= static_cast<int>(hsgd::detect_isa()); ++isa) {
    for (int op = 0; op < HSGD_OP_COUNT; ++op) {
      for (const double divisor : {1.0, 2.0, 3.0}) {
        if (op != HSGD_SUM && divisor != 1) continue;
        check_same([&] {
          std::vector<T> out(kCount);
          hsgd::select_reduce(dtype, static_cast<hsgd_op>(op), static_cast<hsgd::Isa>(isa))(
              {inputs, 2, out.data(), nullptr, kCount, divisor, hsgd::Store::kOrdinary,
               hsgd::Store::kOrdinary});
          return bytes_of(out);
        });
      }
    }
  }
}

}  // namespace

TEST("reductions of all floating dtypes give the same bits in every mode") {
  check_reduce<float>(HSGD_FLOAT32);
  check_reduce<double>(HSGD_FLOAT64);
  check_reduce<uint16_t>(HSGD_FLOAT16);
  check_reduce<uint16_t>(HSGD_BFLOAT16);
}

TEST("conversions to and from 16 bits give the same bits in every mode") {
  for (const hsgd_dtype narrow : {HSGD_FLOAT16, HSGD_BFLOAT16}) {
    for (int isa = 0; isa <= static_cast<int>(hsgd::detect_isa()); ++isa) {
      const hsgd::Conversion of = hsgd::select_conversion(narrow, static_cast<hsgd::Isa>(isa));
      std::vector<float> wide = small_values<float>(5);
      for (uint64_t i = 0; i < kCount; i += 2) wide[i] = static_cast<float>(i + 1) * 1.1e-7F;
      const std::vector<uint16_t> half = small_values<uint16_t>(9);
      check_same([&] {
        std::vector<uint16_t> out(kCount);
        of.narrow(out.data(), wide.data(), kCount);
        return bytes_of(out);
      });
      check_same([&] {
        std::vector<float> out(kCount);
        of.widen(out.data(), half.data(), kCount);
        return bytes_of(out);
      });
    }
  }
}

TEST("steps of LARS give the same bits in every mode, with one thread and two") {
  hsgd::LarsRule rule{};
  rule.lr = 0.1;
  rule.momentum = 0.9;
  rule.weight_decay = 0.01;
  for (const int threads : {1, 2}) {
    check_same([&] {
      std::vector<float> weight = small_values<float>(3);
      std::vector<float> gradient = small_values<float>(4);
      std::vector<float> buffer = small_values<float>(5);
      hsgd::LarsTensor tensor{weight.data(), gradient.data(), buffer.data(), kCount, 0, 0};
      hsgd::lars_step(&tensor, 1, rule, threads);
      weight.insert(weight.end(), buffer.begin(), buffer.end());
      return bytes_of(weight);
    });
  }
}

TEST("the kernels of boxes and triggers give the same bits in every mode") {
  const std::vector<float> a = small_values<float>(6);
  const std::vector<float> b = small_values<float>(50);
  check_same([&] {
    std::vector<float> next(kCount);
    hsgd::choose_add()(a.data(), b.data(), kCount, next.data(), nullptr);
    return bytes_of(next);
  });
  check_same([&] {
    std::vector<float> weights = b;
    std::vector<float> delta(kCount);
    hsgd::ElasticArgs args{};
    args.centre = a.data();
    args.weights = weights.data();
    args.delta = delta.data();
    args.count = kCount;
    args.rate = 0.3F;
    hsgd::choose_elastic()(args);
    weights.insert(weights.end(), delta.begin(), delta.end());
    return bytes_of(weights);
  });
  std::vector<float> far(kCount);
  for (uint64_t i = 0; i < kCount; ++i) far[i] = static_cast<float>(i) * 3e-21F;
  check_same([&] {
    const hsgd::DriftPart part{far.data(), a.data(), 1, kCount, kCount, 1.0};
    return bytes_of(std::vector<double>{hsgd::drift_square({part})});
  });
}
