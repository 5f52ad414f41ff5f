#include "lars.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "capi.hpp"
#include "error.hpp"

// The loops below are compiled once per instruction set; products and sums are not fused
// (-ffp-contract=off), so all of them give the same bits.
#if defined(__x86_64__)
#define HSGD_LARS_ISA(name) __attribute__((target(name)))
#endif

namespace hsgd {
namespace {

// Memory is faster when it is read in two places at once: more lines are under way.
constexpr uint64_t kStreams = 2;
constexpr uint64_t kLanes = 32;   // partial sums side by side in a stream, for every register width
constexpr uint64_t kSteps = 64;   // elements that go into one float32 partial sum
constexpr uint64_t kSkew = 320;   // elements: streams do not begin at equal places of their pages
constexpr uint64_t kCut = 16384;  // elements that are not worth two streams
constexpr uint64_t kAlone = 256 * 1024;  // elements that are not worth a second thread

// Squares of the norms of w and of x, where x is what the rule compares w with.
struct Norms {
  double weight = 0;
  double other = 0;
};

// What is left of a rule for one tensor, once its trust ratio is known:
// d = scale * (g + decay * w); v = momentum * v + d; w -= rate * (nesterov ? momentum * v + d : v).
struct Step {
  float decay = 0;
  float scale = 1;
  float momentum = 0;
  float rate = 0;
  bool nesterov = false;
};

struct Piece {
  float* w;
  const float* g;
  float* v;  // nullptr without momentum
  uint64_t count;
};

struct OfGradient {
  static constexpr bool kReadsBuffer = false;
  static float value(float, float g, float, const Step&) { return g; }
};
struct OfDecayed {
  static constexpr bool kReadsBuffer = false;
  static float value(float w, float g, float, const Step& step) { return g + step.decay * w; }
};
struct OfUpdate {
  static constexpr bool kReadsBuffer = true;
  static float value(float w, float g, float v, const Step& step) {
    const float d = g + step.decay * w;
    const float next = step.momentum * v + d;
    return step.nesterov ? step.momentum * next + d : next;
  }
};

// What Other makes of element i.
template <class Other>
[[gnu::always_inline]] inline float value_of(const Piece& piece, uint64_t i, const Step& step) {
  const float v = Other::kReadsBuffer && piece.v != nullptr ? piece.v[i] : 0.0F;
  return Other::value(piece.w[i], piece.g[i], v, step);
}

// Adds what kCount streams of `length` elements sum up to, the first of which begins at `first`.
template <class Other, uint64_t kCount>
[[gnu::always_inline]] inline void add_squares(const Piece& given_piece, const Step& given,
                                               uint64_t first, uint64_t length, Norms* norms) {
  const Piece piece = given_piece;  // no alias of what is read
  const Step step = given;
  for (uint64_t begin = 0; begin < length; begin += kLanes * kSteps) {
    const uint64_t end = std::min(begin + kLanes * kSteps, length);
    float weights[kCount][kLanes] = {};
    float others[kCount][kLanes] = {};
    uint64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
#pragma GCC unroll 2
      for (uint64_t stream = 0; stream < kCount; ++stream) {
        const uint64_t at = first + stream * length + i;
        for (uint64_t lane = 0; lane < kLanes; ++lane) {
          const float w = piece.w[at + lane];
          const float x = value_of<Other>(piece, at + lane, step);
          weights[stream][lane] += w * w;
          others[stream][lane] += x * x;
        }
      }
    }
    for (uint64_t stream = 0; stream < kCount; ++stream) {
      for (uint64_t lane = 0; i + lane < end; ++lane) {
        const uint64_t at = first + stream * length + i + lane;
        const float x = value_of<Other>(piece, at, step);
        weights[stream][lane] += piece.w[at] * piece.w[at];
        others[stream][lane] += x * x;
      }
    }
    for (uint64_t stream = 0; stream < kCount; ++stream) {
      for (uint64_t lane = 0; lane < kLanes; ++lane) {
        norms->weight += static_cast<double>(weights[stream][lane]);
        norms->other += static_cast<double>(others[stream][lane]);
      }
    }
  }
}

// How many elements each stream has; what is left after them is done by itself.
uint64_t stream_length(uint64_t count) {
  return count < kCut ? 0 : count / kStreams / kLanes * kLanes - kSkew;
}

template <class Other>
[[gnu::always_inline]] inline Norms norms_of(const Piece& piece, const Step& step) {
  Norms norms;
  const uint64_t each = stream_length(piece.count);
  add_squares<Other, kStreams>(piece, step, 0, each, &norms);
  const uint64_t done = kStreams * each;
  add_squares<Other, 1>(piece, step, done, piece.count - done, &norms);
  return norms;
}

template <bool kMomentum, bool kNesterov>
[[gnu::always_inline]] inline void update_run(const Piece& piece, const Step& step, uint64_t begin,
                                              uint64_t count) {
  float* __restrict w = piece.w + begin;
  const float* __restrict g = piece.g + begin;
  float* __restrict v = kMomentum ? piece.v + begin : nullptr;
  for (uint64_t i = 0; i < count; ++i) {
    float d = step.scale * (g[i] + step.decay * w[i]);
    if constexpr (kMomentum) {
      const float next = step.momentum * v[i] + d;
      v[i] = next;
      d = kNesterov ? step.momentum * next + d : next;
    }
    w[i] -= step.rate * d;
  }
}

template <bool kMomentum, bool kNesterov>
[[gnu::always_inline]] inline void update(const Piece& piece, const Step& given) {
  const Step step = given;
  const uint64_t each = stream_length(piece.count);
  for (uint64_t i = 0; i < each; i += kLanes) {
#pragma GCC unroll 2
    for (uint64_t stream = 0; stream < kStreams; ++stream) {
      update_run<kMomentum, kNesterov>(piece, step, stream * each + i, kLanes);
    }
  }
  const uint64_t done = kStreams * each;
  update_run<kMomentum, kNesterov>(piece, step, done, piece.count - done);
}

[[gnu::always_inline]] inline Norms norms_in(int norm_of, const Piece& piece, const Step& step) {
  if (norm_of == HSGD_LARS_GRADIENT) return norms_of<OfGradient>(piece, step);
  if (norm_of == HSGD_LARS_DECAYED) return norms_of<OfDecayed>(piece, step);
  return norms_of<OfUpdate>(piece, step);
}

[[gnu::always_inline]] inline void update_in(const Piece& piece, const Step& step) {
  if (piece.v == nullptr) return update<false, false>(piece, step);
  if (step.nesterov) return update<true, true>(piece, step);
  return update<true, false>(piece, step);
}

struct Kernels {
  Norms (*norms)(int norm_of, const Piece& piece, const Step& step);
  void (*update)(const Piece& piece, const Step& step);
};

Norms norms_plain(int norm_of, const Piece& piece, const Step& step) {
  return norms_in(norm_of, piece, step);
}
void update_plain(const Piece& piece, const Step& step) { update_in(piece, step); }

#if defined(__x86_64__)
HSGD_LARS_ISA("avx2")
Norms norms_avx2(int norm_of, const Piece& piece, const Step& step) {
  return norms_in(norm_of, piece, step);
}
HSGD_LARS_ISA("avx2") void update_avx2(const Piece& piece, const Step& step) {
  update_in(piece, step);
}
HSGD_LARS_ISA("avx512f,prefer-vector-width=512")
Norms norms_avx512(int norm_of, const Piece& piece, const Step& step) {
  return norms_in(norm_of, piece, step);
}
HSGD_LARS_ISA("avx512f,prefer-vector-width=512")
void update_avx512(const Piece& piece, const Step& step) { update_in(piece, step); }
#endif

Kernels choose_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {norms_avx512, update_avx512};
  if (__builtin_cpu_supports("avx2")) return {norms_avx2, update_avx2};
#endif
  return {norms_plain, update_plain};
}

// False where a norm is 0, or no number: then there is no ratio.
bool find_ratio(const Norms& squares, const hsgd_lars_rule& rule, double* ratio) {
  const double w = std::sqrt(squares.weight);
  const double other = std::sqrt(squares.other);
  if (!(w > 0) || !(other > 0)) return false;
  const double decay = rule.norm_of == HSGD_LARS_GRADIENT ? rule.weight_decay * w : 0;
  *ratio = rule.trust_coefficient * w / (other + decay + rule.eps);
  return true;
}

// `squares`: nullptr as long as, or where, the ratio is not wanted.
Step step_of(const hsgd_lars_rule& rule, const Norms* squares) {
  double decay = rule.weight_decay;
  double trust = 1;
  if (squares != nullptr) {
    const bool found = find_ratio(*squares, rule, &trust);
    if (!found && rule.plain_at_zero != 0) {
      decay = 0;
    } else if (rule.clip != 0) {
      trust = std::min(trust / rule.lr, 1.0);
    }
  }
  const bool inside = rule.lr_in_momentum != 0;
  const bool on_update = rule.norm_of == HSGD_LARS_UPDATE;  // the buffer stays free of the ratio
  Step step;
  step.decay = static_cast<float>(decay);
  step.momentum = static_cast<float>(rule.momentum);
  step.nesterov = rule.nesterov != 0;
  step.scale = static_cast<float>(on_update ? 1.0 : inside ? trust * rule.lr : trust);
  step.rate = static_cast<float>(on_update ? trust * rule.lr : inside ? 1.0 : rule.lr);
  return step;
}

// One tensor's share of a step. Its pieces are measured, then updated.
class Layer {
 public:
  Layer(const hsgd_lars_tensor& tensor, const hsgd_lars_rule& rule)
      : tensor_(tensor),
        rule_(rule),
        pieces_((tensor.count + kPiece - 1) / kPiece),
        norms_(pieces_),
        missing_(rule.adapt != 0 ? pieces_ : 0) {}

  uint64_t pieces() const { return pieces_; }

  void measure(const Kernels& kernels, uint64_t index) {
    if (rule_.adapt == 0) return;
    norms_[index] = kernels.norms(rule_.norm_of, piece(index), step_of(rule_, nullptr));
    // Release: whoever sees no piece missing reads all norms. See update().
    missing_.fetch_sub(1, std::memory_order_release);
  }

  void update(const Kernels& kernels, uint64_t index) {
    // Other threads are still computing the norms that this one did not take; they wait for nobody.
    while (missing_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
    Norms sum;
    for (const Norms& norms : norms_) {
      sum.weight += norms.weight;
      sum.other += norms.other;
    }
    kernels.update(piece(index), step_of(rule_, rule_.adapt != 0 ? &sum : nullptr));
  }

 private:
  Piece piece(uint64_t index) const {
    const uint64_t begin = index * kPiece;
    float* buffer = tensor_.buffer == nullptr ? nullptr : tensor_.buffer + begin;
    return {tensor_.weight + begin, tensor_.gradient + begin, buffer,
            std::min(kPiece, tensor_.count - begin)};
  }

  hsgd_lars_tensor tensor_;
  const hsgd_lars_rule& rule_;
  uint64_t pieces_;
  std::vector<Norms> norms_;
  std::atomic<uint64_t> missing_;
};

// Pieces in the order of the tensors, taken by whoever is free. A tensor is updated last piece
// first: that is what the cache still holds.
class Work {
 public:
  Work(const hsgd_lars_tensor* tensors, uint64_t count, const hsgd_lars_rule& rule)
      : kernels_(choose_kernels()) {
    layers_.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      if (tensors[i].count == 0) continue;
      layers_.push_back(std::make_unique<Layer>(tensors[i], rule));
      Layer* layer = layers_.back().get();
      const uint64_t pieces = layer->pieces();
      if (pieces == 1) {
        tasks_.push_back({layer, 0, Task::kBoth});
        continue;
      }
      for (uint64_t k = 0; k < pieces; ++k) tasks_.push_back({layer, k, Task::kMeasure});
      for (uint64_t k = pieces; k > 0; --k) tasks_.push_back({layer, k - 1, Task::kUpdate});
    }
  }

  uint64_t tasks() const { return tasks_.size(); }

  void take_all() {
    // Relaxed: a task number is all that is passed on here; the tasks were made before the threads.
    for (uint64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
      const Task& task = tasks_[i];
      if (task.kind != Task::kUpdate) task.layer->measure(kernels_, task.piece);
      if (task.kind != Task::kMeasure) task.layer->update(kernels_, task.piece);
    }
  }

 private:
  struct Task {
    enum Kind { kMeasure, kUpdate, kBoth };
    Layer* layer;
    uint64_t piece;
    Kind kind;
  };

  Kernels kernels_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Task> tasks_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace

void lars_step(const hsgd_lars_tensor* tensors, uint64_t count, const hsgd_lars_rule& rule,
               int threads) {
  Work work(tensors, count, rule);
  uint64_t elements = 0;
  for (uint64_t i = 0; i < count; ++i) elements += tensors[i].count;
  const uint64_t useful = std::min(work.tasks(), elements / kAlone + 1);
  std::vector<std::thread> others;
  for (uint64_t i = 1; i < std::min<uint64_t>(static_cast<uint64_t>(threads), useful); ++i) {
    try {
      others.emplace_back([&work] { work.take_all(); });
    } catch (const std::system_error&) {
      break;  // no more threads are to be had; those that run do all of it
    }
  }
  work.take_all();
  for (std::thread& other : others) other.join();
}

}  // namespace hsgd

int hsgd_lars_step(const hsgd_lars_tensor* tensors, uint64_t count, const hsgd_lars_rule* rule,
                   int threads, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    if (threads < 1 || rule == nullptr) {
      throw hsgd::Error(HSGD_ERR_ARGUMENT, -1, "LARS: give a rule, and one thread or more");
    }
    hsgd::lars_step(tensors, count, *rule, threads);
  });
}
