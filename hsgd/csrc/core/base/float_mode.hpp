// PlainFloats: sets this thread to IEEE 754 arithmetic while a kernel runs, on every rank.
//
// It clears the bits of the control register that change results: flushing of subnormals to zero,
// which programs turn on per thread (torch.set_flush_denormal), and the rounding direction. Its
// destructor restores the caller's bits. In an anonymous namespace, like
// core/kernels/reduce_kernels.hpp.
#ifndef HSGD_CORE_BASE_FLOAT_MODE_HPP_
#define HSGD_CORE_BASE_FLOAT_MODE_HPP_

#include <cstdint>

namespace hsgd {
namespace {

// Because of "memory", the compiler must not move the assembler over loads and stores. So it cannot
// move arithmetic either: kernels compute only on what they load and store.
class PlainFloats {
 public:
  [[gnu::always_inline]] PlainFloats() : given_(get()) {
    if ((given_ & kChanging) != 0) set(given_ & ~kChanging);
  }
  [[gnu::always_inline]] ~PlainFloats() {
    if ((given_ & kChanging) != 0) set(given_);
  }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kChanging = 0xe040;  // MXCSR: FTZ, rounding, DAZ
  [[gnu::always_inline]] static Register get() {
    Register value;
    asm volatile("stmxcsr %0" : "=m"(value) : : "memory");
    return value;
  }
  [[gnu::always_inline]] static void set(Register value) {
    asm volatile("ldmxcsr %0" : : "m"(value) : "memory");
  }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kChanging = 0x1c80003;  // FPCR: FZ, rounding, FZ16; FIZ, AH
  [[gnu::always_inline]] static Register get() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value) : : "memory");
    return value;
  }
  [[gnu::always_inline]] static void set(Register value) {
    asm volatile("msr fpcr, %0" : : "r"(value) : "memory");
  }
#else
  using Register = uint32_t;  // no such register that we know
  static constexpr Register kChanging = 0;
  static Register get() { return 0; }
  static void set(Register) {}
#endif

  Register given_;
};

}  // namespace
}  // namespace hsgd

#endif  // HSGD_CORE_BASE_FLOAT_MODE_HPP_
