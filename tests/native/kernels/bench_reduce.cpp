// GB/s of the kernels of hsgd/csrc/core/kernels, beside memcpy and a naive loop over the same
// streams.
//
// Build by hand, with the four reduce*.o of the library: g++ -std=c++17 -O3 -march=native
// -ffp-contract=off -Ihsgd/csrc -Ihsgd/csrc/include tests/native/kernels/bench_reduce.cpp
// reduce*.o. Candidates take turns in one run on the same buffers, and each shows its median; a
// byte counts once per read or write, without the read that an ordinary store causes. Results are
// compared before anything is timed.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "core/kernels/reduce.hpp"

using hsgd::Store;

namespace {

// Of this thread: other processes on the machine do not count.
double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;

Buffer buffer(size_t bytes, unsigned seed) {
  Buffer b(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
  // Exponents near 0: neither NaN nor subnormal in float32 and bfloat16.
  for (size_t i = 0; i < bytes; i += 2) {
    const auto bits = static_cast<uint16_t>(0x3f00 + (seed + i / 2 * 37) % 200);
    std::memcpy(b.get() + i, &bits, 2);
  }
  return b;
}

__attribute__((noinline)) void naive_float(const float* const* in, int n, float* __restrict out,
                                           size_t count) {
  const float *a = in[0], *b = in[1];
  if (n == 2) {
    for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
  } else {
    const float *c = in[2], *d = in[3];
    for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i] + c[i] + d[i];
  }
}

float widen(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t narrow(float f) {  // for numbers only
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__attribute__((noinline)) void naive_bfloat(const uint16_t* const* in, int n,
                                            uint16_t* __restrict out, size_t count) {
  const uint16_t *a = in[0], *b = in[1];
  if (n == 2) {
    for (size_t i = 0; i < count; ++i) out[i] = narrow(widen(a[i]) + widen(b[i]));
  } else {
    const uint16_t *c = in[2], *d = in[3];
    for (size_t i = 0; i < count; ++i) {
      out[i] = narrow(widen(a[i]) + widen(b[i]) + widen(c[i]) + widen(d[i]));
    }
  }
}

struct Candidate {
  const char* name;
  std::function<void()> run;
  std::vector<double> seconds;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// The candidates take turns; a sample repeats one for about two milliseconds.
void measure(std::vector<Candidate>& candidates, size_t traffic) {
  const size_t repeats = std::max<size_t>(1, 20000000 / traffic);
  for (int round = 0; round < 15; ++round) {
    for (Candidate& c : candidates) {
      const double begin = cpu_seconds();
      for (size_t i = 0; i < repeats; ++i) c.run();
      c.seconds.push_back((cpu_seconds() - begin) / static_cast<double>(repeats));
    }
  }
}

void print(const char* title, size_t bytes, size_t traffic, const std::vector<Candidate>& all) {
  std::printf("%-12s %6zu KB", title, bytes / 1024);
  for (const Candidate& c : all) {
    std::printf("  %s %6.2f", c.name, static_cast<double>(traffic) / median(c.seconds) * 1e-9);
  }
  std::printf("\n");
  std::fflush(stdout);
}

bool bench_copy(size_t bytes) {
  const Buffer in = buffer(bytes, 1), out = buffer(bytes, 2);
  const auto copy = hsgd::select_copy(hsgd::detect_isa());
  copy(out.get(), in.get(), bytes, Store::kNonTemporal);
  if (std::memcmp(in.get(), out.get(), bytes) != 0) return false;
  std::vector<Candidate> all = {
      {"memcpy", [&] { std::memcpy(out.get(), in.get(), bytes); }, {}},
      {"ordinary", [&] { copy(out.get(), in.get(), bytes, Store::kOrdinary); }, {}},
      {"non-temporal", [&] { copy(out.get(), in.get(), bytes, Store::kNonTemporal); }, {}}};
  measure(all, 2 * bytes);
  print("copy", bytes, 2 * bytes, all);
  return true;
}

template <typename T>
bool bench_reduce(const char* title, hsgd_dtype dtype, int n, size_t bytes,
                  void (*naive)(const T* const*, int, T*, size_t), size_t phase) {
  std::vector<Buffer> in;
  std::vector<const void*> inputs;
  std::vector<const T*> typed;
  for (int k = 0; k < n; ++k) {
    in.push_back(buffer(bytes, static_cast<unsigned>(k)));
    inputs.push_back(in.back().get());
    typed.push_back(reinterpret_cast<const T*>(in.back().get()));
  }
  const size_t count = bytes / sizeof(T);
  const Buffer out = buffer(bytes, 0), out2 = buffer(bytes + 64, 0), wanted = buffer(bytes, 0);
  const auto reduce = hsgd::select_reduce(dtype, HSGD_SUM, hsgd::detect_isa());
  const auto run = [&](Store store, void* second, Store store2, double divisor) {
    reduce({inputs.data(), n, out.get(), second, count, divisor, store, store2});
  };
  const Store ordinary = Store::kOrdinary, nt = Store::kNonTemporal;
  naive(typed.data(), n, reinterpret_cast<T*>(wanted.get()), count);
  run(nt, nullptr, ordinary, 1.0);
  if (std::memcmp(out.get(), wanted.get(), bytes) != 0) return false;

  std::vector<Candidate> one = {
      {"naive", [&] { naive(typed.data(), n, reinterpret_cast<T*>(out.get()), count); }, {}},
      {"ordinary", [&] { run(ordinary, nullptr, ordinary, 1.0); }, {}},
      {"non-temporal", [&] { run(nt, nullptr, ordinary, 1.0); }, {}},
      {"mean of 3", [&] { run(ordinary, nullptr, ordinary, 3.0); }, {}}};
  const size_t traffic = static_cast<size_t>(n + 1) * bytes;
  measure(one, traffic);
  print(title, bytes, traffic, one);

  char* second = out2.get() + phase;
  std::vector<Candidate> two = {{"ordinary", [&] { run(ordinary, second, ordinary, 1.0); }, {}},
                                {"non-temporal", [&] { run(nt, second, nt, 1.0); }, {}},
                                {"mixed", [&] { run(nt, second, ordinary, 1.0); }, {}}};
  measure(two, traffic + bytes);
  print("  two outputs", bytes, traffic + bytes, two);
  return true;
}

}  // namespace

int main() {
  std::printf("GB/s, instruction set %s\n", hsgd::isa_name(hsgd::detect_isa()));
  bool right = true;
  constexpr size_t kPhase = 16;  // of NumPy's large arrays
  for (size_t bytes = 64 << 10; bytes <= (64 << 20); bytes *= 4) {
    right = right && bench_copy(bytes);
    for (const int n : {2, 4}) {
      right = right && bench_reduce<float>(n == 2 ? "float32 x2" : "float32 x4", HSGD_FLOAT32, n,
                                           bytes, naive_float, kPhase);
      right = right && bench_reduce<uint16_t>(n == 2 ? "bfloat16 x2" : "bfloat16 x4", HSGD_BFLOAT16,
                                              n, bytes, naive_bfloat, kPhase);
    }
  }
  if (!right) std::printf("a result differs from the naive loop\n");
  return right ? 0 : 1;
}
