// The LARS step: the formula in double, and the same bits whatever the number of threads.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "lars.hpp"

namespace {

// Small and large layers in turn, so that threads meet in the middle of one.
constexpr uint64_t kSizes[] = {7, 3 * hsgd::kPiece + 5, 1, hsgd::kPiece, 2 * hsgd::kPiece, 0, 1000};

struct Layer {
  std::vector<float> weight, gradient, buffer;
};

std::vector<Layer> make_layers() {
  uint32_t state = 12345;
  const auto draw = [&] {
    state = state * 1664525U + 1013904223U;
    return static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0F;
  };
  std::vector<Layer> layers;
  for (const uint64_t size : kSizes) {
    Layer layer;
    for (std::vector<float>* values : {&layer.weight, &layer.gradient, &layer.buffer}) {
      for (uint64_t i = 0; i < size; ++i) values->push_back(draw());
    }
    layers.push_back(layer);
  }
  return layers;
}

void step(std::vector<Layer>& layers, const hsgd_lars_rule& rule, int threads) {
  std::vector<hsgd_lars_tensor> table;
  for (Layer& layer : layers) {
    table.push_back({layer.weight.data(), layer.gradient.data(),
                     rule.momentum > 0 ? layer.buffer.data() : nullptr, layer.weight.size()});
  }
  hsgd_error error{};
  CHECK_EQ(hsgd_lars_step(table.data(), table.size(), &rule, threads, &error), 0);
}

hsgd_lars_rule rule_of(int norm_of, double momentum, int nesterov) {
  hsgd_lars_rule rule{};
  rule.lr = 0.5;
  rule.momentum = momentum;
  rule.weight_decay = 0.01;
  rule.trust_coefficient = 0.02;
  rule.eps = 1e-6;
  rule.adapt = 1;
  rule.norm_of = norm_of;
  rule.nesterov = nesterov;
  return rule;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST("any number of threads gives the same bits") {
  for (const int norm_of : {HSGD_LARS_GRADIENT, HSGD_LARS_DECAYED, HSGD_LARS_UPDATE}) {
    std::vector<Layer> alone = make_layers();
    step(alone, rule_of(norm_of, 0.9, 1), 1);
    for (const int threads : {2, 3, 5}) {
      std::vector<Layer> together = make_layers();
      step(together, rule_of(norm_of, 0.9, 1), threads);
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
  const hsgd_lars_rule rule = rule_of(HSGD_LARS_GRADIENT, 0.0, 0);
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

TEST("a step without threads or without a rule is refused") {
  const hsgd_lars_rule rule = rule_of(HSGD_LARS_GRADIENT, 0, 0);
  hsgd_error error{};
  CHECK_EQ(hsgd_lars_step(nullptr, 0, &rule, 0, &error), static_cast<int>(HSGD_ERR_ARGUMENT));
  CHECK_EQ(hsgd_lars_step(nullptr, 0, nullptr, 1, &error), static_cast<int>(HSGD_ERR_ARGUMENT));
}
