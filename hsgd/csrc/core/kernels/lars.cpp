#include "core/kernels/lars.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/float_mode.hpp"
#include "core/kernels/lars_kernels.hpp"

namespace hsgd {
namespace {

constexpr uint64_t kAlone = 256 * 1024;  // elements: fewer are not worth a second thread
constexpr uint64_t kSampled = 4;         // positions of a piece that show if it was written,
constexpr uint64_t kSample = 16;         // and elements at each position

// Squares of the norms of w and of x; the rule compares w with x.
struct Norms {
  double weight = 0;
  double other = 0;
};

LarsValue compared_by(const LarsRule& rule) {
  if (rule.norm_of == LarsNorm::kGradient) return LarsValue::kGradient;
  return rule.norm_of == LarsNorm::kDecayed ? LarsValue::kDecayed : LarsValue::kMoved;
}

// Returns false if a norm is 0 or not finite: then there is no ratio.
bool find_ratio(const Norms& squares, const LarsRule& rule, double* ratio) {
  const double w = std::sqrt(squares.weight);
  const double other = std::sqrt(squares.other);
  if (!(w > 0) || !(other > 0)) return false;
  const double decay = rule.norm_of == LarsNorm::kGradient ? rule.weight_decay * w : 0;
  *ratio = rule.trust_coefficient * w / (other + decay + rule.eps);
  return true;
}

// `squares` is nullptr if the ratio is not known yet or not wanted.
LarsStep step_of(const LarsRule& rule, const Norms* squares) {
  double decay = rule.weight_decay;
  double trust = 1;
  if (squares != nullptr) {
    const bool found = find_ratio(*squares, rule, &trust);
    if (!found && rule.plain_at_zero) {
      decay = 0;
    } else if (rule.clip) {
      trust = std::min(trust / rule.lr, 1.0);
    }
  }
  const bool inside = rule.lr_in_momentum;
  const bool on_update = rule.norm_of == LarsNorm::kUpdate;  // the buffer stays free of the ratio
  LarsStep step;
  step.decay = static_cast<float>(decay);
  step.momentum = static_cast<float>(rule.momentum);
  step.nesterov = rule.nesterov;
  step.scale = static_cast<float>(on_update ? 1.0 : inside ? trust * rule.lr : trust);
  step.rate = static_cast<float>(on_update ? trust * rule.lr : inside ? 1.0 : rule.lr);
  return step;
}

// Returns a checksum of a piece: the sum of some elements' bit patterns as integers.
uint64_t sample_of(const LarsPiece& piece) {
  uint64_t sum = 0;
  for (uint64_t k = 0; k < kSampled; ++k) {
    const uint64_t begin = piece.count / kSampled * k;
    uint32_t bits[kSample] = {};
    std::memcpy(bits, piece.w + begin, std::min(kSample, piece.count - begin) * sizeof(float));
    for (const uint32_t word : bits) sum += word;
  }
  return sum;
}

// Changes weights and buffers that were updated with the scale of `done` into those that `due`
// would have given, except for rounding. The ratio is in the buffer.
void correct(const LarsPiece& piece, const LarsStep& done, const LarsStep& due) {
  const double m = done.momentum;
  const bool has_buffer = piece.v != nullptr;
  // The update subtracted rate * (of_v * v + of_d * d), with d = g + decay * w and the old w.
  const double of_v = !has_buffer ? 0 : done.nesterov ? m : 1;
  const auto of_d = [&](const LarsStep& step) {
    return has_buffer && !step.nesterov ? 0.0 : static_cast<double>(step.scale);
  };
  const double more = static_cast<double>(due.scale) - done.scale;
  const double rate = done.rate;
  const double decay = done.decay;
  for (uint64_t i = 0; i < piece.count; ++i) {
    const double v = has_buffer ? piece.v[i] : 0;
    const double known = piece.w[i] + rate * of_v * v;
    const double d = (piece.g[i] + decay * known) / (1 - decay * rate * of_d(done));
    const double before = known + rate * of_d(done) * d;
    const double next = v + more * d;
    if (has_buffer) piece.v[i] = static_cast<float>(next);
    piece.w[i] = static_cast<float>(before - rate * (of_v * next + of_d(due) * d));
  }
}

// One tensor's share of a step. Its pieces are measured first, then updated.
//
// For a large layer, the norm of the weights is summed while they are updated; the caller keeps it
// for the next step. Two checks show that the weights were written since then: a few elements
// before the step, which finds a write to all weights; and the norm, summed again during the
// update.
class Layer {
 public:
  Layer(LarsTensor& tensor, const LarsRule& rule, const LarsKernels& kernels)
      : tensor_(tensor),
        rule_(rule),
        kernels_(kernels),
        pieces_((tensor.count + kPiece - 1) / kPiece),
        keeps_(rule.adapt && rule.norm_of == LarsNorm::kGradient && pieces_ > 1),
        knows_(keeps_ && std::isnormal(tensor.square) && tensor.square > 0 &&
               sample() == tensor.sample),
        norms_(rule.adapt ? pieces_ : 0),
        squares_(keeps_ ? pieces_ : 0),
        samples_(keeps_ ? pieces_ : 0),
        unmeasured_(norms_.size()),
        left_(pieces_) {
    if (!rule.adapt) step_ = step_of(rule, nullptr);
    if (!keeps_) tensor.square = 0;
  }

  uint64_t pieces() const { return pieces_; }

  void measure(uint64_t index) {
    if (!rule_.adapt) return;
    const LarsStep plain = step_of(rule_, nullptr);
    Norms& norms = norms_[index];
    if (!knows_) norms.weight = kernels_.square(LarsValue::kWeight, piece(index), plain);
    norms.other = kernels_.square(compared_by(rule_), piece(index), plain);
    // Acquire: the last thread reads what the others wrote. Release: they wrote it before.
    if (unmeasured_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (const Norms& part : norms_) {
      sum_.weight += part.weight;
      sum_.other += part.other;
    }
    if (knows_) sum_.weight = tensor_.square;
    step_ = step_of(rule_, &sum_);
    // Release: a thread that sees it can read the step. Partner: update().
    measured_.store(true, std::memory_order_release);
  }

  void update(uint64_t index) {
    // Other threads still compute norms that this thread did not take; they wait for no other
    // thread.
    while (rule_.adapt && !measured_.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    if (!keeps_) return kernels_.update(piece(index), step_);
    squares_[index] = kernels_.update_and_sum(piece(index), step_);
    samples_[index] = sample_of(piece(index));
    // The last thread reads what the others wrote, as in measure().
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
  }

 private:
  LarsPiece piece(uint64_t index) const {
    const uint64_t begin = index * kPiece;
    float* buffer = tensor_.buffer == nullptr ? nullptr : tensor_.buffer + begin;
    return {tensor_.weight + begin, tensor_.gradient + begin, buffer,
            std::min(kPiece, tensor_.count - begin)};
  }

  uint64_t sample() const {
    uint64_t sum = 0;
    for (uint64_t k = 0; k < pieces_; ++k) sum += sample_of(piece(k));
    return sum;
  }

  void finish() {
    LarsSquares all;
    for (const LarsSquares& squares : squares_) {
      all.before += squares.before;
      all.after += squares.after;
    }
    if (knows_ && all.before != tensor_.square) {
      const Norms right{all.before, sum_.other};
      all.after = 0;
      for (uint64_t k = 0; k < pieces_; ++k) {
        correct(piece(k), step_, step_of(rule_, &right));
        all.after += kernels_.square(LarsValue::kWeight, piece(k), step_);
        samples_[k] = sample_of(piece(k));
      }
    }
    tensor_.square = all.after;
    tensor_.sample = std::accumulate(samples_.begin(), samples_.end(), uint64_t{0});
  }

  LarsTensor& tensor_;
  const LarsRule& rule_;
  const LarsKernels& kernels_;
  const uint64_t pieces_;
  const bool keeps_;  // keeps the norm of the weights for the next step
  const bool knows_;  // knows the norm from the last step
  std::vector<Norms> norms_;
  std::vector<LarsSquares> squares_;
  std::vector<uint64_t> samples_;
  Norms sum_;
  LarsStep step_;
  std::atomic<uint64_t> unmeasured_;
  std::atomic<bool> measured_{false};
  std::atomic<uint64_t> left_;  // pieces to update
};

// Pieces in the order of the tensors; a free thread takes the next one. A tensor is updated from
// its last piece to its first: the last pieces are still in the cache.
class Work {
 public:
  Work(LarsTensor* tensors, uint64_t count, const LarsRule& rule) : kernels_(lars_kernels()) {
    layers_.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      if (tensors[i].count == 0) continue;
      layers_.push_back(std::make_unique<Layer>(tensors[i], rule, kernels_));
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
    const PlainFloats mode;
    // Relaxed: only a task number is passed on; the tasks were made before the threads.
    for (uint64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();) {
      const Task& task = tasks_[i];
      if (task.kind != Task::kUpdate) task.layer->measure(task.piece);
      if (task.kind != Task::kMeasure) task.layer->update(task.piece);
    }
  }

 private:
  struct Task {
    enum Kind { kMeasure, kUpdate, kBoth };
    Layer* layer;
    uint64_t piece;
    Kind kind;
  };

  const LarsKernels kernels_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<Task> tasks_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace

void lars_step(LarsTensor* tensors, uint64_t count, const LarsRule& rule, int threads) {
  if (threads < 1) throw_invalid("LARS: threads is %d; give 1 or more", threads);
  const PlainFloats mode;
  Work work(tensors, count, rule);
  uint64_t elements = 0;
  for (uint64_t i = 0; i < count; ++i) elements += tensors[i].count;
  const uint64_t useful = std::min(work.tasks(), elements / kAlone + 1);
  std::vector<std::thread> others;
  for (uint64_t i = 1; i < std::min<uint64_t>(static_cast<uint64_t>(threads), useful); ++i) {
    try {
      others.emplace_back([&work] { work.take_all(); });
    } catch (const std::system_error&) {
      break;  // no more threads are available; the running ones do all pieces
    }
  }
  work.take_all();
  for (std::thread& other : others) other.join();
}

}  // namespace hsgd
