// The reduction kernels, written once as templates over an instruction set, a format and an op.
//
// Holds the loop, the rules of core/kernels/reduce.hpp in code and the table of kernels. Must not
// include anything with inline functions: each reduce_<isa>.cpp is compiled for another processor,
// and if two of them emitted the same inline function, the linker would keep one copy, perhaps the
// AVX-512 one, for all processors. For the same reason everything here is in an anonymous
// namespace, although this is a header, and calls only compiler built-ins.
//
// An instruction set `I` is a class with
// - kBytes: the size of a vector of values,
// - half_to_float, float_to_half, zero_extend (uint16_t to uint32_t): conversions of vectors,
// - load_part, store_part: the first `bytes` of a vector, zeros for the rest,
// - stream, fence: a non-temporal store to an aligned address, and the fence that orders it.
#ifndef HSGD_CORE_KERNELS_REDUCE_KERNELS_HPP_
#define HSGD_CORE_KERNELS_REDUCE_KERNELS_HPP_

#include "core/base/float_mode.hpp"
#include "core/kernels/reduce.hpp"

#if defined(__FAST_MATH__)
#error "reduce: -ffast-math breaks NaN, signed zeros and the order of sums; compile without it"
#endif

namespace hsgd {
namespace {

template <typename T, size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <typename S>
inline S load(const char* p) {
  S s;
  __builtin_memcpy(&s, p, sizeof s);
  return s;
}

template <typename S>
inline void store(char* p, S s) {
  __builtin_memcpy(p, &s, sizeof s);
}

// load_part and store_part without masks: in pieces of 32, 16, ... 1 bytes.
struct PartsByPieces {
  static void copy(char* to, const char* from, size_t bytes) {
    piece<32>(to, from, bytes);
    piece<16>(to, from, bytes);
    piece<8>(to, from, bytes);
    piece<4>(to, from, bytes);
    piece<2>(to, from, bytes);
    piece<1>(to, from, bytes);
  }
  template <typename S>
  static S load_part(const char* p, size_t bytes) {
    S s = {};
    copy(reinterpret_cast<char*>(&s), p, bytes);
    return s;
  }
  template <typename S>
  static void store_part(char* p, S s, size_t bytes) {
    copy(p, reinterpret_cast<const char*>(&s), bytes);
  }

 private:
  template <size_t kPiece>
  static void piece(char*& to, const char*& from, size_t bytes) {
    if ((bytes & kPiece) == 0) return;
    __builtin_memcpy(to, from, kPiece);
    to += kPiece;
    from += kPiece;
  }
};

// Formats: the type of an element in memory (Stored) and in a register (Value). narrow() handles
// one NaN only, the quiet one by which Finish replaces all others before.

template <typename T, bool kIsFloat>
struct Native {
  using Stored = T;
  using Value = T;
  static constexpr bool kFloat = kIsFloat;
  template <typename I, typename V, typename S>
  static V widen(S s) {
    return s;
  }
  template <typename I, typename S, typename V>
  static S narrow(V v) {
    return v;
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static constexpr bool kFloat = true;
  template <typename I, typename V, typename S>
  static V widen(S s) {
    return I::half_to_float(s);
  }
  template <typename I, typename S, typename V>
  static S narrow(V v) {
    return I::float_to_half(v);
  }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Value = float;
  static constexpr bool kFloat = true;
  template <typename I, typename V, typename S>
  static V widen(S s) {
    return bit_cast<V>(I::zero_extend(s) << 16);
  }
  // The quiet NaN without payload rounds like a number: no carry into its exponent.
  template <typename I, typename S, typename V>
  static S narrow(V v) {
    const auto bits = bit_cast<typename VectorOf<uint32_t, sizeof(V)>::Type>(v);
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, S);
  }
};

template <typename I, typename F>
struct Lanes {
  using V = typename VectorOf<typename F::Value, I::kBytes>::Type;
  static constexpr size_t kStoredBytes =
      I::kBytes / sizeof(typename F::Value) * sizeof(typename F::Stored);
  using S = typename VectorOf<typename F::Stored, kStoredBytes>::Type;
};

// Ops; `a` is the earlier input. `b != b` means "b is NaN" and is false for integers. A NaN in `a`
// stays, because comparisons with it are false.

struct Sum {
  template <typename V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <typename V>
  static V apply(V a, V b) {
    return a * b;
  }
};
struct Min {
  template <typename V>
  static V apply(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <typename V>
  static V apply(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

// The last step: divides, and makes all NaNs equal. Does neither for integers.
template <typename F, bool kFloat = F::kFloat>
class Finish {
 public:
  explicit Finish(double) {}
  template <typename V>
  V operator()(V v) const {
    return v;
  }
};

template <typename F>
class Finish<F, true> {
 public:
  // Division by a power of two is multiplication by its inverse: the same bits, many times faster.
  explicit Finish(double divisor) : divisor_(static_cast<Value>(divisor)), inverse_(1 / divisor_) {
    const bool power = (bit_cast<uint64_t>(divisor) & 0xfffffffffffff) == 0;
    divides_ = divisor != 1;
    multiplies_ = power && divisor > 0 && divisor <= 0x1p100;
  }

  template <typename V>
  V operator()(V v) const {
    if (divides_) v = multiplies_ ? v * inverse_ : v / divisor_;
    const V nan = V{} + static_cast<Value>(__builtin_nanf(""));
    return v != v ? nan : v;
  }

 private:
  using Value = typename F::Value;
  Value divisor_, inverse_;
  bool divides_, multiplies_;
};

// One of the two outputs, and the kind of store for its vectors.
template <typename I, typename S>
class Output {
 public:
  // `start`: bytes before the first vector of the main loop.
  Output(void* data, Store store, size_t start)
      : data_(static_cast<char*>(data)),
        streams_(data != nullptr && store == Store::kNonTemporal &&
                 reinterpret_cast<uintptr_t>(data_ + start) % sizeof(S) == 0) {}

  template <int kGroup>
  void put(size_t offset, const S (&group)[kGroup]) const {
    if (data_ == nullptr) return;
    char* p = data_ + offset;
    if (streams_) {
#pragma GCC unroll 8
      for (int u = 0; u < kGroup; ++u) I::stream(p + u * sizeof(S), group[u]);
    } else {
#pragma GCC unroll 8
      for (int u = 0; u < kGroup; ++u) store(p + u * sizeof(S), group[u]);
    }
  }
  // Stores vectors at the ends, which overlap those of the main loop.
  void put_end(size_t offset, S s) const {
    if (data_ != nullptr) store(data_ + offset, s);
  }
  void put_part(S s, size_t bytes) const {
    if (data_ != nullptr) I::store_part(data_, s, bytes);
  }
  bool streams() const { return streams_; }

 private:
  char* data_;
  bool streams_;
};

// Reduces kGroup consecutive vectors of all inputs, `offset` bytes from their starts, with `read`
// for loads. `ahead`: distance of the prefetch in bytes; 0: none.
template <typename I, typename F, typename Op, int kGroup, typename Read>
inline void combine(const ReduceArgs& args, const Finish<F>& finish, size_t offset, size_t ahead,
                    const Read& read, typename Lanes<I, F>::S (&result)[kGroup]) {
  using V = typename Lanes<I, F>::V;
  using S = typename Lanes<I, F>::S;
  V total[kGroup];
  const char* in = static_cast<const char*>(args.inputs[0]) + offset;
  const auto prefetch = [&] {
    if (ahead == 0) return;
#pragma GCC unroll 8
    for (size_t b = 0; b < kGroup * sizeof(S); b += 64) __builtin_prefetch(in + ahead + b);
  };
  prefetch();
#pragma GCC unroll 8
  for (int u = 0; u < kGroup; ++u) {
    total[u] = F::template widen<I, V>(read(in + u * sizeof(S)));
  }
  for (int k = 1; k < args.input_count; ++k) {
    in = static_cast<const char*>(args.inputs[k]) + offset;
    prefetch();
#pragma GCC unroll 8
    for (int u = 0; u < kGroup; ++u) {
      total[u] = Op::apply(total[u], F::template widen<I, V>(read(in + u * sizeof(S))));
    }
  }
#pragma GCC unroll 8
  for (int u = 0; u < kGroup; ++u) result[u] = F::template narrow<I, S>(finish(total[u]));
}

// Returns the start of the main loop: the first aligned address of the output that needs it most.
template <typename S>
inline size_t start_bytes(const ReduceArgs& args, size_t item_bytes) {
  const bool second =
      args.out2 != nullptr && args.store == Store::kOrdinary && args.store2 == Store::kNonTemporal;
  const size_t start = -reinterpret_cast<uintptr_t>(second ? args.out2 : args.out) % sizeof(S);
  return start % item_bytes == 0 ? start : 0;
}

// Computes the vectors at both ends before any store, and stores them last: they overlap the main
// loop. So the main loop starts at an aligned address of the output and needs no scalar tail, even
// if the output is one of the inputs.
template <typename I, typename F, typename Op>
void reduce_pass(const ReduceArgs& args) noexcept {
  using S = typename Lanes<I, F>::S;
  constexpr int kGroup = 4;              // measured: 1 and 2 lose up to 40 % in the L2 cache
  constexpr size_t kAheadBytes = 1024;   // measured: +10 % from DRAM, +20 % from the L3 cache
  constexpr size_t kFarBytes = 1 << 17;  // smaller arrays are likely in a near cache
  const Finish<F> finish(args.divisor);
  const size_t bytes = args.count * sizeof(typename F::Stored);
  const auto whole = [](const char* p) { return load<S>(p); };

  if (bytes < sizeof(S)) {
    const auto part = [bytes](const char* p) { return I::template load_part<S>(p, bytes); };
    S only[1];
    combine<I, F, Op>(args, finish, 0, 0, part, only);
    Output<I, S>(args.out, args.store, 0).put_part(only[0], bytes);
    Output<I, S>(args.out2, args.store2, 0).put_part(only[0], bytes);
    return;
  }

  const size_t start = start_bytes<S>(args, sizeof(typename F::Stored));
  const Output<I, S> out(args.out, args.store, start);
  const Output<I, S> out2(args.out2, args.store2, start);
  const bool has_head = start != 0;
  const bool has_tail = (bytes - start) % sizeof(S) != 0;
  S head[1] = {}, tail[1] = {};
  if (has_head) combine<I, F, Op>(args, finish, 0, 0, whole, head);
  if (has_tail) combine<I, F, Op>(args, finish, bytes - sizeof(S), 0, whole, tail);

  const size_t ahead = bytes >= kFarBytes ? kAheadBytes : 0;
  size_t at = start;
  for (S group[kGroup]; at + sizeof(group) <= bytes; at += sizeof(group)) {
    combine<I, F, Op>(args, finish, at, ahead, whole, group);
    out.put(at, group);
    out2.put(at, group);
  }
  for (S one[1]; at + sizeof(one) <= bytes; at += sizeof(one)) {
    combine<I, F, Op>(args, finish, at, 0, whole, one);
    out.put(at, one);
    out2.put(at, one);
  }
  if (has_head) {
    out.put_end(0, head[0]);
    out2.put_end(0, head[0]);
  }
  if (has_tail) {
    out.put_end(bytes - sizeof(S), tail[0]);
    out2.put_end(bytes - sizeof(S), tail[0]);
  }
  if (out.streams() || out2.streams()) I::fence();
}

// Copies `count` bytes from the only input to the outputs, with memcpy if that is enough: it is
// faster.
template <typename I>
void copy_pass(const ReduceArgs& args) noexcept {
  if (args.out2 != nullptr || args.store == Store::kNonTemporal) {
    reduce_pass<I, Native<uint8_t, false>, Sum>(args);
  } else if (args.count > 0 && args.out != args.inputs[0]) {
    __builtin_memcpy(args.out, args.inputs[0], args.count);
  }
}

template <typename I>
void copy(void* dst, const void* src, size_t bytes, Store store) noexcept {
  copy_pass<I>({&src, 1, dst, nullptr, bytes, 1.0, store, Store::kOrdinary});
}

template <typename I, typename F, typename Op>
void reduce(const ReduceArgs& args) noexcept {
  if (args.input_count > 1 || (F::kFloat && args.divisor != 1)) {
    if constexpr (F::kFloat) {
      const PlainFloats mode;
      reduce_pass<I, F, Op>(args);
    } else {
      reduce_pass<I, F, Op>(args);
    }
  } else {
    ReduceArgs raw = args;
    raw.count *= sizeof(typename F::Stored);
    copy_pass<I>(raw);
  }
}

// Converts from format F to G; one of them is float32. The last vector overlaps the one before it;
// arrays shorter than one vector are read and written in part.
template <typename I, typename From, typename To>
void convert(void* dst, const void* src, size_t count) noexcept {
  using V = typename VectorOf<float, I::kBytes>::Type;
  using In = typename Lanes<I, From>::S;
  using Out = typename Lanes<I, To>::S;
  constexpr size_t kLanes = I::kBytes / sizeof(float);
  const PlainFloats mode;
  const Finish<To> finish(1.0);
  const auto converted = [&finish](In in) {
    return To::template narrow<I, Out>(finish(From::template widen<I, V>(in)));
  };
  const auto* from = static_cast<const char*>(src);
  auto* to = static_cast<char*>(dst);
  if (count < kLanes) {
    const In in = I::template load_part<In>(from, count * sizeof(typename From::Stored));
    I::store_part(to, converted(in), count * sizeof(typename To::Stored));
    return;
  }
  for (size_t i = 0; i + kLanes <= count; i += kLanes) {
    store(to + i * sizeof(typename To::Stored),
          converted(load<In>(from + i * sizeof(typename From::Stored))));
  }
  const size_t last = count - kLanes;
  store(to + last * sizeof(typename To::Stored),
        converted(load<In>(from + last * sizeof(typename From::Stored))));
}

template <typename I>
Conversion select_conversion_of(hsgd_dtype narrow) noexcept {
  using Single = Native<float, true>;
  if (narrow == HSGD_FLOAT16) return {convert<I, Single, Float16>, convert<I, Float16, Single>};
  if (narrow == HSGD_BFLOAT16) return {convert<I, Single, Bfloat16>, convert<I, Bfloat16, Single>};
  return {};
}

template <typename I, typename Arithmetic, typename Ordering = Arithmetic>
ReduceFn select_op(hsgd_op op) noexcept {
  switch (op) {
    case HSGD_MIN:
      return reduce<I, Ordering, Min>;
    case HSGD_MAX:
      return reduce<I, Ordering, Max>;
    case HSGD_PROD:
      return reduce<I, Arithmetic, Prod>;
    default:
      return reduce<I, Arithmetic, Sum>;
  }
}

// Integers are added and multiplied unsigned, which wraps, and compared with their own type.
template <typename I>
ReduceFn select(hsgd_dtype dtype, hsgd_op op) noexcept {
  switch (dtype) {
    case HSGD_FLOAT32:
      return select_op<I, Native<float, true>>(op);
    case HSGD_FLOAT64:
      return select_op<I, Native<double, true>>(op);
    case HSGD_FLOAT16:
      return select_op<I, Float16>(op);
    case HSGD_BFLOAT16:
      return select_op<I, Bfloat16>(op);
    case HSGD_INT8:
      return select_op<I, Native<uint8_t, false>, Native<int8_t, false>>(op);
    case HSGD_INT32:
      return select_op<I, Native<uint32_t, false>, Native<int32_t, false>>(op);
    case HSGD_INT64:
      return select_op<I, Native<uint64_t, false>, Native<int64_t, false>>(op);
    case HSGD_UINT8:
      return select_op<I, Native<uint8_t, false>>(op);
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_REDUCE_KERNELS_HPP_
