// The LARS step: the formula in double, the same bits whatever the number of threads, and norms of
// weights that are kept from one step to the next.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/kernels/lars.hpp"
#include "support/check.hpp"

namespace {

// Small and large layers in turn, so that threads meet in the middle of one.
constexpr uint64_t kSizes[] = {7, 3 * hsgd::kPiece + 5, 1, hsgd::kPiece, 2 * hsgd::kPiece, 0, 1000};

struct Layer {
  std::vector<float> weight, gradient, buffer;
  double square = 0;
  uint64_t sample = 0;
};

std::vector<Layer> make_layers() {
  uint32_t state = 12345;
  const auto draw = [&] {
    state = state * 1664525U + 1013904223U;
    return static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0F;
  };
  std::vector<Layer> layers;
  for (const uint64_t size : kSizes) {
    Layer layer{};
    for (std::vector<float>* values : {&layer.weight, &layer.gradient, &layer.buffer}) {
      for (uint64_t i = 0; i < size; ++i) values->push_back(draw());
    }
    layers.push_back(layer);
  }
  return layers;
}

void step(std::vector<Layer>& layers, const hsgd::LarsRule& rule, int threads) {
  std::vector<hsgd::LarsTensor> table;
  for (Layer& layer : layers) {
    table.push_back({layer.weight.data(), layer.gradient.data(),
                     rule.momentum > 0 ? layer.buffer.data() : nullptr, layer.weight.size(),
                     layer.square, layer.sample});
  }
  hsgd::lars_step(table.data(), table.size(), rule, threads);
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].square = table[i].square;
    layers[i].sample = table[i].sample;
  }
}

void forget(std::vector<Layer>& layers) {
  for (Layer& layer : layers) layer.square = 0;
}

hsgd::LarsRule rule_of(hsgd::LarsNorm norm_of, double momentum, bool nesterov) {
  hsgd::LarsRule rule{};
  rule.lr = 0.5;
  rule.momentum = momentum;
  rule.weight_decay = 0.01;
  rule.trust_coefficient = 0.02;
  rule.eps = 1e-6;
  rule.adapt = true;
  rule.norm_of = norm_of;
  rule.nesterov = nesterov;
  return rule;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool same_bits(const std::vector<Layer>& a, const std::vector<Layer>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), [](const Layer& x, const Layer& y) {
    return same_bits(x.weight, y.weight) && same_bits(x.buffer, y.buffer) && x.square == y.square;
  });
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double size = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(b[i], 2);
  }
  return std::sqrt(difference / size);
}

double square_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += std::pow(value, 2);
  return sum;
}

// Momentum, and whether it is Nesterov's.
struct Momentum {
  double momentum;
  bool nesterov;
};
constexpr Momentum kMomenta[] = {{0.0, false}, {0.9, false}, {0.9, true}};

}  // namespace

TEST("any number of threads gives the same bits") {
  for (const auto norm_of :
       {hsgd::LarsNorm::kGradient, hsgd::LarsNorm::kDecayed, hsgd::LarsNorm::kUpdate}) {
    std::vector<Layer> alone = make_layers();
    step(alone, rule_of(norm_of, 0.9, true), 1);
    for (const int threads : {2, 3, 5}) {
      std::vector<Layer> together = make_layers();
      step(together, rule_of(norm_of, 0.9, true), threads);
      for (size_t i = 0; i < alone.size(); ++i) {
        CHECK(same_bits(together[i].weight, alone[i].weight));
        CHECK(same_bits(together[i].buffer, alone[i].buffer));
      }
    }
  }
}

TEST("a step is the formula of the norms in double") {
  std::vector<Layer> layers = make_layers();
  const std::vector<Layer> before = make_layers();
  const hsgd::LarsRule rule = rule_of(hsgd::LarsNorm::kGradient, 0.0, false);
  step(layers, rule, 2);
  for (size_t k = 0; k < layers.size(); ++k) {
    double w2 = 0;
    double g2 = 0;
    for (size_t i = 0; i < before[k].weight.size(); ++i) {
      w2 += std::pow(before[k].weight[i], 2);
      g2 += std::pow(before[k].gradient[i], 2);
    }
    const double w = std::sqrt(w2);
    const double trust =
        rule.trust_coefficient * w / (std::sqrt(g2) + rule.weight_decay * w + rule.eps);
    double worst = 0;
    for (size_t i = 0; i < before[k].weight.size(); ++i) {
      const double d = before[k].gradient[i] + rule.weight_decay * before[k].weight[i];
      const double expected = before[k].weight[i] - rule.lr * trust * d;
      worst = std::max(worst, std::abs(layers[k].weight[i] - expected));
    }
    CHECK(worst < 1e-6);
  }
}

TEST("a norm that is kept has the bits of one that is read") {
  for (const auto& [momentum, nesterov] : kMomenta) {
    for (const int threads : {1, 3}) {
      std::vector<Layer> kept = make_layers();
      std::vector<Layer> read = make_layers();
      for (int i = 0; i < 3; ++i) {
        step(kept, rule_of(hsgd::LarsNorm::kGradient, momentum, nesterov), threads);
        forget(read);
        step(read, rule_of(hsgd::LarsNorm::kGradient, momentum, nesterov), 1);
        CHECK(same_bits(kept, read));
      }
      for (const Layer& layer : kept)
        CHECK_EQ(layer.square > 0, layer.weight.size() > hsgd::kPiece);
    }
  }
}

TEST("norms are kept only where the rule needs them") {
  std::vector<Layer> layers = make_layers();
  step(layers, rule_of(hsgd::LarsNorm::kGradient, 0.9, false), 1);
  hsgd::LarsRule unscaled = rule_of(hsgd::LarsNorm::kGradient, 0.9, false);
  unscaled.adapt = false;
  step(layers, unscaled, 1);
  for (const Layer& layer : layers) CHECK_EQ(layer.square, 0.0);
}

TEST("a write to all weights is seen before the step") {
  std::vector<Layer> kept = make_layers();
  step(kept, rule_of(hsgd::LarsNorm::kGradient, 0.9, false), 1);
  for (Layer& layer : kept) {
    for (float& w : layer.weight) w *= 0.5F;
  }
  std::vector<Layer> read = kept;
  forget(read);
  step(kept, rule_of(hsgd::LarsNorm::kGradient, 0.9, false), 2);
  step(read, rule_of(hsgd::LarsNorm::kGradient, 0.9, false), 1);
  CHECK(same_bits(kept, read));
}

TEST("a write to a few weights is made up for") {
  for (const auto& [momentum, nesterov] : kMomenta) {
    for (const int inside : {0, 1}) {
      for (const float value : {30.0F, 0.0F}) {
        hsgd::LarsRule rule = rule_of(hsgd::LarsNorm::kGradient, momentum, nesterov);
        rule.lr_in_momentum = inside;
        std::vector<Layer> kept = make_layers();
        const auto write = [&](float written) {  // not to the elements that are looked at
          for (Layer& layer : kept) {
            const uint64_t end = std::min<uint64_t>(layer.weight.size(), 200);
            for (uint64_t i = 100; i < end; ++i) layer.weight[i] = written;
          }
        };
        write(value == 0 ? 30.0F : 0.0F);  // so that the norm shrinks, or grows
        step(kept, rule, 1);
        write(value);
        std::vector<Layer> read = kept;
        forget(read);
        std::vector<Layer> before = kept;
        step(kept, rule, 2);
        step(read, rule, 1);
        for (size_t k = 0; k < kept.size(); ++k) {
          CHECK(relative_error(kept[k].weight, read[k].weight) < 1e-6);
          CHECK(relative_error(kept[k].buffer, read[k].buffer) < 1e-5);
          if (kept[k].weight.size() <= hsgd::kPiece) continue;
          const double change = square_of(before[k].weight) / before[k].square;
          CHECK(change < 0.8 || change > 1.2);  // enough to be missed
          CHECK(std::abs(kept[k].square / read[k].square - 1) < 1e-5);
        }
        read = kept;  // from here on as if nothing had happened
        forget(read);
        step(kept, rule, 1);
        step(read, rule, 1);
        CHECK(same_bits(kept, read));
      }
    }
  }
}

TEST("weights that somebody set to zero take the step of zero weights") {
  hsgd::LarsRule rule = rule_of(hsgd::LarsNorm::kGradient, 0.9, false);
  rule.plain_at_zero = true;
  std::vector<Layer> kept = make_layers();
  for (Layer& layer : kept) {  // zeros where a step looks, and everywhere but in a few places
    for (size_t i = 0; i < layer.weight.size(); ++i) {
      layer.weight[i] = i == 100 ? 2.0F : 0.0F;
      layer.gradient[i] = i == 100 ? 1.0F : 0.0F;
      layer.buffer[i] = 0;
    }
  }
  step(kept, rule, 1);
  for (Layer& layer : kept) {
    if (layer.weight.size() > 100) layer.weight[100] = 0;
  }
  std::vector<Layer> read = kept;
  forget(read);
  step(kept, rule, 1);
  step(read, rule, 1);
  for (size_t k = 0; k < kept.size(); ++k) {
    CHECK(relative_error(kept[k].weight, read[k].weight) < 1e-6);
  }
}

TEST("a step without threads is refused") {
  const hsgd::LarsRule rule = rule_of(hsgd::LarsNorm::kGradient, 0, false);
  CHECK_THROWS(hsgd::lars_step(nullptr, 0, rule, 0), "threads is 0; give 1 or more");
}
