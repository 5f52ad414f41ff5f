// Tests of hsgd/csrc/core/kernels/reduce*: every kernel of every instruction set of this machine
// against a scalar reference that shares no code with them, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "core/kernels/reduce.hpp"
#include "support/check.hpp"

using hsgd::Isa;
using hsgd::ReduceArgs;
using hsgd::Store;

namespace {

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (int i = 0; i <= static_cast<int>(hsgd::detect_isa()); ++i)
    all.push_back(static_cast<Isa>(i));
  return all;
}

template <typename To, typename From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- The reference: 16-bit floats by their definition, in double, which holds them all exactly.

struct Format {
  int fraction_bits;
  int least_exponent;  // of normal numbers
  int bias;
};
constexpr Format kHalf{10, -14, 15};
constexpr Format kBrain{7, -126, 127};

float decode(Format f, uint16_t bits) {
  const int top = (1 << (15 - f.fraction_bits)) - 1;
  const int exponent = (bits >> f.fraction_bits) & top;
  const int fraction = bits & ((1 << f.fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == top) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : static_cast<float>(sign * std::numeric_limits<double>::infinity());
  }
  const int whole = exponent == 0 ? fraction : fraction + (1 << f.fraction_bits);
  const int power = std::max(exponent, 1) - f.bias - f.fraction_bits;
  return static_cast<float>(sign * std::ldexp(whole, power));
}

uint16_t encode(Format f, float value) {
  const int top = (1 << (15 - f.fraction_bits)) - 1;
  const int infinity = top << f.fraction_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (f.fraction_bits - 1));
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const double magnitude = std::fabs(static_cast<double>(value));
  const int exponent =
      magnitude == 0 ? f.least_exponent : std::max(std::ilogb(magnitude), f.least_exponent);
  // nearbyint rounds to nearest even. A carry moves into the exponent field by itself.
  const auto steps =
      static_cast<int64_t>(std::nearbyint(std::ldexp(magnitude, f.fraction_bits - exponent)));
  const int64_t bits =
      steps + (static_cast<int64_t>(exponent - f.least_exponent) << f.fraction_bits);
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, infinity));
}

// Element types of the reference: Raw in memory, Value in arithmetic.
template <typename T>
struct Plain {
  using Raw = T;
  using Value = T;
  static constexpr double kNearSubnormal = sizeof(T) == 4 ? 0x1p-125 : 0x1p-1021;
  static T decode(T v) { return v; }
  static T encode(T v) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(v)) return std::numeric_limits<T>::quiet_NaN();
    }
    return v;
  }
};
struct Half {
  using Raw = uint16_t;
  using Value = float;
  static constexpr double kNearSubnormal = 0x1p-13;
  static float decode(uint16_t v) { return ::decode(kHalf, v); }
  static uint16_t encode(float v) { return ::encode(kHalf, v); }
};
struct Brain {
  using Raw = uint16_t;
  using Value = float;
  static constexpr double kNearSubnormal = 0x1p-125;
  static float decode(uint16_t v) { return ::decode(kBrain, v); }
  static uint16_t encode(float v) { return ::encode(kBrain, v); }
};

template <typename T>
T apply(hsgd_op op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (op == HSGD_PROD) return a * b;
    if (op == HSGD_SUM || op == HSGD_MEAN) return a + b;
  } else {
    // Exact in 128 bits, then reduced modulo 2^w: what wrapping means.
    if (op == HSGD_PROD) return static_cast<T>(static_cast<__int128>(a) * b);
    if (op == HSGD_SUM || op == HSGD_MEAN) return static_cast<T>(static_cast<__int128>(a) + b);
  }
  if (op == HSGD_MIN) return b < a ? b : a;
  return b > a ? b : a;
}

template <typename E>
std::vector<typename E::Raw> expected(const std::vector<std::vector<typename E::Raw>>& inputs,
                                      hsgd_op op, double divisor) {
  using Value = typename E::Value;
  std::vector<typename E::Raw> out(inputs[0].size());
  if (inputs.size() == 1 && divisor == 1) return inputs[0];
  for (size_t i = 0; i < out.size(); ++i) {
    Value total = E::decode(inputs[0][i]);
    for (size_t k = 1; k < inputs.size(); ++k) total = apply(op, total, E::decode(inputs[k][i]));
    if constexpr (std::is_floating_point_v<Value>) {
      if (divisor != 1) total /= static_cast<Value>(divisor);
    }
    out[i] = E::encode(total);
  }
  return out;
}

// ---- Inputs: numbers of similar size, numbers of any bits, and the special ones.

template <typename E>
typename E::Raw random_element(std::mt19937_64& random) {
  using Value = typename E::Value;
  const uint64_t word = random();
  typename E::Raw any;
  std::memcpy(&any, &word, sizeof any);
  if constexpr (std::is_floating_point_v<Value>) {
    const auto near_one =
        static_cast<Value>(static_cast<double>(static_cast<int64_t>(word)) * 0x1p-63);
    const Value infinity = std::numeric_limits<Value>::infinity();
    const Value zero = 0;
    switch (random() % 16) {
      case 0:
        return any;
      case 1:
        return E::encode(word % 2 != 0 ? infinity : -infinity);
      case 2:
        return E::encode(word % 2 != 0 ? zero : -zero);
      case 3:
        return E::encode(near_one * static_cast<Value>(E::kNearSubnormal));
      case 4:
        return E::encode(near_one * 1000);
      default:
        return E::encode(near_one);
    }
  }
  return any;
}

// ---- Memory: each array at a chosen distance from a 64-byte line, between guards.

class Placed {
 public:
  Placed(const void* data, size_t bytes, size_t phase)
      : memory_(bytes + 256, kGuard), bytes_(bytes) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory_.data()) + 64;
    offset_ = 64 + (-base % 64) + phase;
    if (bytes > 0 && data != nullptr) std::memcpy(memory_.data() + offset_, data, bytes);
  }
  char* data() { return memory_.data() + offset_; }
  bool holds(const void* wanted) const {
    const char* at = memory_.data() + offset_;
    return bytes_ == 0 || std::memcmp(at, wanted, bytes_) == 0;
  }
  bool guarded() const {
    const auto is_guard = [](char c) { return c == kGuard; };
    const auto begin = memory_.begin(), end = memory_.end();
    const auto at = begin + static_cast<ptrdiff_t>(offset_);
    return std::all_of(begin, at, is_guard) &&
           std::all_of(at + static_cast<ptrdiff_t>(bytes_), end, is_guard);
  }

 private:
  static constexpr char kGuard = 0x5a;
  std::vector<char> memory_;
  size_t bytes_;
  size_t offset_;
};

struct Mode {
  int out;   // -1: apart; else in place of that input (modulo their number)
  int out2;  // -2: none; -1: apart; else in place
  Store store, store2;
  size_t phase;  // bytes between a line and the first input; others step on by `step`
  size_t step;
};

constexpr Store kOrd = Store::kOrdinary;
constexpr Store kNt = Store::kNonTemporal;
constexpr Mode kModes[] = {
    {-1, -2, kOrd, kOrd, 0, 0}, {-1, -2, kNt, kOrd, 0, 0},  {-1, -2, kOrd, kOrd, 8, 24},
    {-1, -2, kNt, kOrd, 8, 24}, {-1, -1, kOrd, kOrd, 0, 8}, {-1, -1, kNt, kOrd, 0, 16},
    {-1, -1, kOrd, kNt, 16, 8}, {-1, -1, kNt, kNt, 0, 0},   {-1, -1, kNt, kNt, 0, 16},
    {-1, -1, kNt, kNt, 32, 8},  {-1, -1, kNt, kNt, 1, 3},   {-1, -1, kOrd, kNt, 3, 1},
    {0, -2, kOrd, kOrd, 0, 0},  {0, -2, kNt, kOrd, 8, 16},  {1, -2, kNt, kOrd, 24, 0},
    {7, -2, kOrd, kOrd, 1, 5},  {-1, 0, kNt, kOrd, 16, 0},  {-1, 1, kOrd, kNt, 0, 24},
    {0, 1, kNt, kNt, 0, 16},    {16, 0, kOrd, kOrd, 40, 8}, {0, -1, kOrd, kNt, 56, 16},
};

template <typename E>
void run_mode(hsgd::ReduceFn reduce, const std::vector<std::vector<typename E::Raw>>& inputs,
              const std::vector<typename E::Raw>& wanted, double divisor, const Mode& mode) {
  const size_t bytes = wanted.size() * sizeof(typename E::Raw);
  const int n = static_cast<int>(inputs.size());
  if (mode.out >= 0 && mode.out2 >= 0 && mode.out % n == mode.out2 % n) return;
  std::vector<Placed> placed;
  std::vector<const void*> pointers;
  size_t phase = mode.phase;
  for (const auto& input : inputs) {
    placed.emplace_back(input.data(), bytes, phase % 64);
    phase += mode.step;
  }
  placed.emplace_back(nullptr, bytes, phase % 64);
  placed.emplace_back(nullptr, bytes, (phase + mode.step) % 64);
  for (int k = 0; k < n; ++k) pointers.push_back(placed[static_cast<size_t>(k)].data());

  const auto at = [&](int which, int apart) {
    return static_cast<size_t>(which >= 0 ? which % n : apart);
  };
  const size_t out = at(mode.out, n), out2 = at(mode.out2, n + 1);
  reduce({pointers.data(), n, placed[out].data(), mode.out2 == -2 ? nullptr : placed[out2].data(),
          wanted.size(), divisor, mode.store, mode.store2});
  bool right = placed[out].holds(wanted.data());
  if (mode.out2 != -2) right = right && placed[out2].holds(wanted.data());
  for (size_t k = 0; k < placed.size(); ++k) {
    right = right && placed[k].guarded();
    const bool untouched = k < inputs.size() && k != out && (k != out2 || mode.out2 == -2);
    if (untouched) right = right && placed[k].holds(inputs[k].data());
  }
  if (!right) {
    std::fprintf(stderr, "  inputs %d, count %zu, divisor %g, mode %d\n", n, wanted.size(), divisor,
                 static_cast<int>(&mode - kModes));
  }
  CHECK(right);
}

// Nothing here has a second thread.
#if defined(__SANITIZE_THREAD__)
constexpr size_t kInputs[] = {2, 9};
#else
constexpr size_t kInputs[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17};
#endif

template <typename E>
void run_dtype(hsgd_dtype dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype) + 1);
  for (int op = 0; op < HSGD_OP_COUNT; ++op) {
    for (const size_t n : kInputs) {
      for (const size_t count : {0, 1, 3, 63, 64, 65, 1000, 4099}) {
        std::vector<std::vector<typename E::Raw>> inputs(n);
        for (auto& input : inputs) {
          for (size_t i = 0; i < count; ++i) input.push_back(random_element<E>(random));
        }
        const double divisor = op == HSGD_MEAN ? static_cast<double>(n) : 1.0;
        const auto wanted = expected<E>(inputs, static_cast<hsgd_op>(op), divisor);
        for (const Isa isa : isas()) {
          const auto reduce = hsgd::select_reduce(dtype, static_cast<hsgd_op>(op), isa);
          for (const Mode& mode : kModes) run_mode<E>(reduce, inputs, wanted, divisor, mode);
        }
      }
    }
  }
}

// One op on arrays of equal length, by every instruction set; the results agree with the reference.
template <typename E>
std::vector<typename E::Raw> reduced(hsgd_dtype dtype, hsgd_op op,
                                     const std::vector<std::vector<typename E::Raw>>& inputs,
                                     double divisor = 1.0) {
  const auto wanted = expected<E>(inputs, op, divisor);
  for (const Isa isa : isas()) {
    run_mode<E>(hsgd::select_reduce(dtype, op, isa), inputs, wanted, divisor, kModes[4]);
  }
  return wanted;
}

constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

TEST("float32 equals the reference in all modes") { run_dtype<Plain<float>>(HSGD_FLOAT32); }
TEST("float64 equals the reference in all modes") { run_dtype<Plain<double>>(HSGD_FLOAT64); }
TEST("float16 equals the reference in all modes") { run_dtype<Half>(HSGD_FLOAT16); }
TEST("bfloat16 equals the reference in all modes") { run_dtype<Brain>(HSGD_BFLOAT16); }
TEST("int8 equals the reference in all modes") { run_dtype<Plain<int8_t>>(HSGD_INT8); }
TEST("int32 equals the reference in all modes") { run_dtype<Plain<int32_t>>(HSGD_INT32); }
TEST("int64 equals the reference in all modes") { run_dtype<Plain<int64_t>>(HSGD_INT64); }
TEST("uint8 equals the reference in all modes") { run_dtype<Plain<uint8_t>>(HSGD_UINT8); }

TEST("a NaN in any place makes every op's result the one quiet NaN") {
  const float quiet = bits_of<float>(0xffc12345u), signalling = bits_of<float>(0x7f800001u);
  for (const hsgd_op op : {HSGD_SUM, HSGD_MIN, HSGD_MAX, HSGD_PROD}) {
    for (const float nan : {quiet, signalling}) {
      const std::vector<float> one(37, 1.0f), bad(37, nan);
      CHECK_EQ(bits_of<uint32_t>(reduced<Plain<float>>(HSGD_FLOAT32, op, {bad, one})[36]),
               0x7fc00000u);
      CHECK_EQ(bits_of<uint32_t>(reduced<Plain<float>>(HSGD_FLOAT32, op, {one, bad, one})[0]),
               0x7fc00000u);
    }
  }
  CHECK_EQ(bits_of<uint32_t>(reduced<Plain<float>>(HSGD_FLOAT32, HSGD_SUM, {{kInf}, {-kInf}})[0]),
           0x7fc00000u);
}

TEST("bfloat16 keeps NaN apart from infinity and overflows to infinity") {
  const std::vector<uint16_t> all_ones(40, 0x7fff), one(40, 0x3f80), most(40, 0x7f7f);
  CHECK_EQ(reduced<Brain>(HSGD_BFLOAT16, HSGD_SUM, {all_ones, one})[39], 0x7fc0);
  CHECK_EQ(reduced<Brain>(HSGD_BFLOAT16, HSGD_SUM, {most, most})[0], 0x7f80);
}

TEST("min and max keep the earlier of two zeros of different sign") {
  for (const size_t count : {1, 100}) {
    const std::vector<float> plus(count, 0.0f), minus(count, -0.0f);
    for (const hsgd_op op : {HSGD_MIN, HSGD_MAX}) {
      const auto first_plus = reduced<Plain<float>>(HSGD_FLOAT32, op, {plus, minus});
      const auto first_minus = reduced<Plain<float>>(HSGD_FLOAT32, op, {minus, plus});
      CHECK(!std::signbit(first_plus.back()));
      CHECK(std::signbit(first_minus.back()));
    }
  }
}

TEST("16-bit floats round once, after all inputs") {
  // 1 + 2^-8 four times: each step alone would be rounded away.
  const std::vector<uint16_t> one(50, encode(kBrain, 1.0f)), small(50, encode(kBrain, 0x1p-8f));
  CHECK_EQ(reduced<Brain>(HSGD_BFLOAT16, HSGD_SUM, {one, small, small, small, small})[7],
           encode(kBrain, 1.0f + 0x1p-6f));
  const std::vector<uint16_t> half_one(50, encode(kHalf, 1.0f)),
      half_small(50, encode(kHalf, 0x1p-11f));
  CHECK_EQ(reduced<Half>(HSGD_FLOAT16, HSGD_SUM, {half_one, half_small, half_small})[7],
           encode(kHalf, 1.0f + 0x1p-10f));
}

TEST("every 16-bit pattern passes through widening and rounding") {
  std::vector<uint16_t> all;
  for (int i = 0; i < 65536; ++i) all.push_back(static_cast<uint16_t>(i));
  reduced<Half>(HSGD_FLOAT16, HSGD_MAX, {all, all});
  reduced<Brain>(HSGD_BFLOAT16, HSGD_MAX, {all, all});
}

TEST("16-bit sums, products and quotients round to nearest even, also to subnormals and infinity") {
  std::mt19937_64 random(7);
  std::vector<uint16_t> a, b;
  for (int i = 0; i < 300000; ++i) {
    const uint64_t word = random();
    a.push_back(static_cast<uint16_t>(word));
    b.push_back(static_cast<uint16_t>(word % 3 == 0 ? (word >> 16 & 0x83ff) : word >> 16));
  }
  for (const hsgd_op op : {HSGD_SUM, HSGD_PROD}) {
    reduced<Half>(HSGD_FLOAT16, op, {a, b});
    reduced<Brain>(HSGD_BFLOAT16, op, {a, b});
  }
  for (const double divisor : {2.0, 3.0, 64.0, 1000.0}) {
    reduced<Half>(HSGD_FLOAT16, HSGD_MEAN, {a, b}, divisor);
    reduced<Brain>(HSGD_BFLOAT16, HSGD_MEAN, {a, b}, divisor);
  }
}

TEST("the divisor divides exactly as a division, powers of two and a single input included") {
  std::mt19937_64 random(9);
  std::vector<float> a;
  std::vector<double> b;
  for (int i = 0; i < 20000; ++i) {
    a.push_back(random_element<Plain<float>>(random));
    b.push_back(random_element<Plain<double>>(random));
  }
  for (const double divisor : {0.25, 2.0, 3.0, 4.0, 7.0, 8.0, 10.0, 1024.0, 12345.0}) {
    reduced<Plain<float>>(HSGD_FLOAT32, HSGD_MEAN, {a, a}, divisor);
    reduced<Plain<float>>(HSGD_FLOAT32, HSGD_MEAN, {a}, divisor);
    reduced<Plain<double>>(HSGD_FLOAT64, HSGD_MEAN, {b}, divisor);
  }
}

TEST("a copy keeps every bit, signalling NaNs included") {
  const std::vector<float> odd(77, bits_of<float>(0xff800001u));
  const auto same = reduced<Plain<float>>(HSGD_FLOAT32, HSGD_SUM, {odd});
  CHECK_EQ(bits_of<uint32_t>(same[76]), 0xff800001u);
}

TEST("an element's bits depend neither on its position nor on the count") {
  std::mt19937_64 random(11);
  for (const hsgd_op op : {HSGD_SUM, HSGD_MIN, HSGD_MAX, HSGD_PROD}) {
    const std::vector<float> a(1, random_element<Plain<float>>(random)),
        b(1, bits_of<float>(0x80000000u));
    const auto alone = reduced<Plain<float>>(HSGD_FLOAT32, op, {a, b});
    for (size_t count = 2; count < 200; ++count) {
      const std::vector<float> many_a(count, a[0]), many_b(count, b[0]);
      const auto many = reduced<Plain<float>>(HSGD_FLOAT32, op, {many_a, many_b});
      CHECK(std::all_of(many.begin(), many.end(), [&](float v) {
        return bits_of<uint32_t>(v) == bits_of<uint32_t>(alone[0]);
      }));
    }
  }
}

TEST("copies of all sizes and alignments are exact and stay inside") {
  std::mt19937_64 random(13);
  std::vector<char> source(100000);
  for (char& c : source) c = static_cast<char>(random());
  for (const Isa isa : isas()) {
    const auto copy = hsgd::select_copy(isa);
    for (const Store store : {kOrd, kNt}) {
      for (size_t bytes = 0; bytes < 100000; bytes += 1 + bytes / 9) {
        for (const size_t phase : {0, 1, 8, 16, 31, 32, 63}) {
          Placed from(source.data(), bytes, phase), to(nullptr, bytes, phase * 3 % 64);
          copy(to.data(), from.data(), bytes, store);
          CHECK(to.holds(source.data()) && to.guarded());
          copy(from.data(), from.data(), bytes, store);
          CHECK(from.holds(source.data()) && from.guarded());
        }
      }
    }
  }
}

TEST("narrowing rounds as the reference does and makes one NaN; widening is exact") {
  std::mt19937_64 random(17);
  std::vector<float> singles(5000);
  for (float& value : singles) value = bits_of<float>(static_cast<uint32_t>(random()));
  const uint32_t odd[] = {0x7fc00000, 0xff800001, 0x7fffffff, 0x7f800000, 0xff800000, 0x80000000,
                          0x477fefff, 0x477ff000, 0x7f7fffff, 0x33000000, 0x33000001, 0x00000001};
  for (size_t i = 0; i < std::size(odd); ++i) singles[i * 7] = bits_of<float>(odd[i]);
  const auto half_of = [](float v) { return encode(kHalf, v); };
  const auto brain_of = [](float v) { return encode(kBrain, v); };
  for (const Isa isa : isas()) {
    for (const hsgd_dtype dtype : {HSGD_FLOAT16, HSGD_BFLOAT16}) {
      const hsgd::Conversion conversion = hsgd::select_conversion(dtype, isa);
      for (size_t count = 0; count <= singles.size(); count += 1 + count / 5) {
        std::vector<uint16_t> rounded(count);
        std::vector<float> exact(count);
        for (size_t i = 0; i < count; ++i) {
          rounded[i] = dtype == HSGD_FLOAT16 ? half_of(singles[i]) : brain_of(singles[i]);
          exact[i] = decode(dtype == HSGD_FLOAT16 ? kHalf : kBrain, rounded[i]);
        }
        for (const size_t phase : {0, 2, 4, 30, 62}) {
          Placed from(singles.data(), count * 4, phase), to(nullptr, count * 2, phase * 3 % 64);
          Placed back(nullptr, count * 4, phase);
          conversion.narrow(to.data(), from.data(), count);
          conversion.widen(back.data(), to.data(), count);
          CHECK(to.holds(rounded.data()) && to.guarded());
          CHECK(back.holds(exact.data()) && back.guarded());
        }
      }
    }
  }
}

TEST("every 16-bit pattern but the odd NaNs survives widening and narrowing") {
  for (const Isa isa : isas()) {
    for (const hsgd_dtype dtype : {HSGD_FLOAT16, HSGD_BFLOAT16}) {
      const Format format = dtype == HSGD_FLOAT16 ? kHalf : kBrain;
      std::vector<uint16_t> all(65536), again(65536);
      std::vector<float> wide(65536);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      const hsgd::Conversion conversion = hsgd::select_conversion(dtype, isa);
      conversion.widen(wide.data(), all.data(), all.size());
      conversion.narrow(again.data(), wide.data(), all.size());
      for (size_t i = 0; i < all.size(); ++i) {
        CHECK_EQ(again[i], encode(format, decode(format, all[i])));
      }
    }
  }
}

TEST("every dtype and op has a kernel on every instruction set, and the names are known") {
  for (const Isa isa : isas()) {
    for (int dtype = 0; dtype < HSGD_DTYPE_COUNT; ++dtype) {
      for (int op = 0; op < HSGD_OP_COUNT; ++op) {
        CHECK(hsgd::select_reduce(static_cast<hsgd_dtype>(dtype), static_cast<hsgd_op>(op), isa) !=
              nullptr);
      }
    }
  }
#if defined(__aarch64__)
  CHECK_EQ(std::string(hsgd::isa_name(Isa::kPlain)), "neon");
#else
  CHECK_EQ(std::string(hsgd::isa_name(Isa::kPlain)), "plain");
#endif
  CHECK_EQ(std::string(hsgd::isa_name(Isa::kAvx2)), "avx2");
  CHECK_EQ(std::string(hsgd::isa_name(Isa::kAvx512)), "avx512");
}
