#include "core/kernels/lars_kernels.hpp"

#include <algorithm>

// The loops below are compiled once per instruction set. Products and sums are not fused
// (-ffp-contract=off), so all instruction sets give the same bits.
#if defined(__x86_64__)
#define HSGD_LARS_ISA(name) __attribute__((target(name)))
#endif

namespace hsgd {
namespace {

constexpr uint64_t kLanes = 32;   // partial sums side by side in a stream, for every register width
constexpr uint64_t kSteps = 64;   // elements that go into one float32 partial sum
constexpr uint64_t kSkew = 320;   // in elements: streams begin at different offsets of their pages
constexpr uint64_t kCut = 16384;  // elements: fewer are not worth more than one stream
// Reading memory in several places at once is faster: more cache lines are in flight.
constexpr uint64_t kStreams = 2;
constexpr uint64_t kReadStreams = 4;  // if one array is read and nothing is written

// Sums of squares per lane: float32 within a block, double over blocks.
template <uint64_t kSums>
struct Totals {
  double lanes[kSums][kLanes] = {};

  double sum(uint64_t which) const {
    double result = 0;
    for (const double lane : lanes[which]) result += lane;
    return result;
  }
};

// Runs `body` over kCount streams of `length` elements; the first stream begins at `first`.
template <uint64_t kCount, class Body>
[[gnu::always_inline]] inline void walk_streams(const Body& given, uint64_t first, uint64_t length,
                                                Totals<Body::kSums>* totals) {
  const Body body = given;  // a copy, which cannot alias what is written
  for (uint64_t begin = 0; begin < length; begin += kLanes * kSteps) {
    const uint64_t end = std::min(begin + kLanes * kSteps, length);
    float sums[kCount][Body::kSums][kLanes] = {};
    uint64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
#pragma GCC unroll 4
      for (uint64_t stream = 0; stream < kCount; ++stream) {
        body.run(first + stream * length + i, kLanes, sums[stream]);
      }
    }
    for (uint64_t stream = 0; stream < kCount; ++stream) {
      if (i < end) body.run(first + stream * length + i, end - i, sums[stream]);
      for (uint64_t which = 0; which < Body::kSums; ++which) {
        for (uint64_t lane = 0; lane < kLanes; ++lane) {
          totals->lanes[which][lane] += static_cast<double>(sums[stream][which][lane]);
        }
      }
    }
  }
}

// Runs `body` over `count` elements: first in streams, then over the rest. Every walk over the same
// count in as many streams sums in the same order.
template <uint64_t kCount, class Body>
[[gnu::always_inline]] inline Totals<Body::kSums> walk(const Body& body, uint64_t count) {
  Totals<Body::kSums> totals;
  const uint64_t each = count < kCut ? 0 : count / kCount / kLanes * kLanes - kSkew;
  walk_streams<kCount>(body, 0, each, &totals);
  walk_streams<1>(body, kCount * each, count - kCount * each, &totals);
  return totals;
}

struct OfWeight {
  static float value(const LarsPiece& piece, uint64_t i, const LarsStep&) { return piece.w[i]; }
};
struct OfGradient {
  static float value(const LarsPiece& piece, uint64_t i, const LarsStep&) { return piece.g[i]; }
};
struct OfDecayed {
  static float value(const LarsPiece& piece, uint64_t i, const LarsStep& step) {
    return piece.g[i] + step.decay * piece.w[i];
  }
};
struct OfMoved {
  static float value(const LarsPiece& piece, uint64_t i, const LarsStep& step) {
    const float d = OfDecayed::value(piece, i, step);
    const float next = step.momentum * (piece.v == nullptr ? 0.0F : piece.v[i]) + d;
    return step.nesterov ? step.momentum * next + d : next;
  }
};

template <class Value>
struct Squaring {
  static constexpr uint64_t kSums = 1;
  LarsPiece piece;
  LarsStep step;

  [[gnu::always_inline]] void run(uint64_t at, uint64_t count, float (&sums)[1][kLanes]) const {
    for (uint64_t i = 0; i < count; ++i) {
      const float x = Value::value(piece, at + i, step);
      sums[0][i] += x * x;
    }
  }
};

template <class Value, uint64_t kCount>
[[gnu::always_inline]] inline double square_of(const LarsPiece& piece, const LarsStep& step) {
  return walk<kCount>(Squaring<Value>{piece, step}, piece.count).sum(0);
}

[[gnu::always_inline]] inline double square_in(LarsValue of, const LarsPiece& piece,
                                               const LarsStep& step) {
  switch (of) {
    case LarsValue::kWeight:
      return square_of<OfWeight, kStreams>(piece, step);
    case LarsValue::kGradient:
      return square_of<OfGradient, kReadStreams>(piece, step);
    case LarsValue::kDecayed:
      return square_of<OfDecayed, kStreams>(piece, step);
    case LarsValue::kMoved:
      return square_of<OfMoved, kStreams>(piece, step);
  }
  return 0;
}

template <bool kMomentum, bool kNesterov, bool kSquares>
struct Updating {
  static constexpr uint64_t kSums = 2;
  LarsPiece piece;
  LarsStep step;

  [[gnu::always_inline]] void run(uint64_t at, uint64_t count, float (&sums)[2][kLanes]) const {
    float* __restrict w = piece.w + at;
    const float* __restrict g = piece.g + at;
    float* __restrict v = kMomentum ? piece.v + at : nullptr;
    for (uint64_t i = 0; i < count; ++i) {
      const float before = w[i];
      float d = step.scale * (g[i] + step.decay * before);
      if constexpr (kMomentum) {
        const float next = step.momentum * v[i] + d;
        v[i] = next;
        d = kNesterov ? step.momentum * next + d : next;
      }
      const float after = before - step.rate * d;
      w[i] = after;
      if constexpr (kSquares) {
        sums[0][i] += before * before;
        sums[1][i] += after * after;
      }
    }
  }
};

template <bool kSquares>
[[gnu::always_inline]] inline LarsSquares update_in(const LarsPiece& piece, const LarsStep& step) {
  Totals<2> totals;
  if (piece.v == nullptr) {
    totals = walk<kStreams>(Updating<false, false, kSquares>{piece, step}, piece.count);
  } else if (step.nesterov) {
    totals = walk<kStreams>(Updating<true, true, kSquares>{piece, step}, piece.count);
  } else {
    totals = walk<kStreams>(Updating<true, false, kSquares>{piece, step}, piece.count);
  }
  return {totals.sum(0), totals.sum(1)};
}

double square_plain(LarsValue of, const LarsPiece& piece, const LarsStep& step) {
  return square_in(of, piece, step);
}
void update_plain(const LarsPiece& piece, const LarsStep& step) { update_in<false>(piece, step); }
LarsSquares update_and_sum_plain(const LarsPiece& piece, const LarsStep& step) {
  return update_in<true>(piece, step);
}

#if defined(__x86_64__)
HSGD_LARS_ISA("avx2")
double square_avx2(LarsValue of, const LarsPiece& piece, const LarsStep& step) {
  return square_in(of, piece, step);
}
HSGD_LARS_ISA("avx2") void update_avx2(const LarsPiece& piece, const LarsStep& step) {
  update_in<false>(piece, step);
}
HSGD_LARS_ISA("avx2")
LarsSquares update_and_sum_avx2(const LarsPiece& piece, const LarsStep& step) {
  return update_in<true>(piece, step);
}
HSGD_LARS_ISA("avx512f,prefer-vector-width=512")
double square_avx512(LarsValue of, const LarsPiece& piece, const LarsStep& step) {
  return square_in(of, piece, step);
}
HSGD_LARS_ISA("avx512f,prefer-vector-width=512")
void update_avx512(const LarsPiece& piece, const LarsStep& step) { update_in<false>(piece, step); }
HSGD_LARS_ISA("avx512f,prefer-vector-width=512")
LarsSquares update_and_sum_avx512(const LarsPiece& piece, const LarsStep& step) {
  return update_in<true>(piece, step);
}
#endif

}  // namespace

LarsKernels lars_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    return {square_avx512, update_avx512, update_and_sum_avx512};
  if (__builtin_cpu_supports("avx2")) return {square_avx2, update_avx2, update_and_sum_avx2};
#endif
  return {square_plain, update_plain, update_and_sum_plain};
}

}  // namespace hsgd
