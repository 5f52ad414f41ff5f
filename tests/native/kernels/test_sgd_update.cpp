// Updates without the program: as the kernel's own, and only where everything was told.
#include <vector>

#include "core/base/error.hpp"
#include "core/kernels/lars.hpp"
#include "core/kernels/sgd_update.hpp"
#include "support/check.hpp"

namespace {

using hsgd::ElementUpdate;

constexpr uint64_t kCount = 101;

hsgd::LarsRule rule_of(double lr, double momentum) {
  hsgd::LarsRule rule{};
  rule.lr = lr;
  rule.momentum = momentum;
  rule.weight_decay = 0.01;
  return rule;
}

struct Parameter {
  explicit Parameter(float first) {
    for (uint64_t i = 0; i < kCount; ++i) {
      weight[i] = first + static_cast<float>(i);
      gradient[i] = 1.0F / (first + static_cast<float>(i));
    }
  }
  ElementUpdate::Gradient its() const { return {gradient.data(), kCount}; }
  std::vector<float> weight = std::vector<float>(kCount);
  std::vector<float> gradient = std::vector<float>(kCount);
  std::vector<float> buffer = std::vector<float>(kCount);
};

void step_by_kernel(Parameter& parameter, const hsgd::LarsRule& rule) {
  float* buffer = rule.momentum == 0 ? nullptr : parameter.buffer.data();
  hsgd::LarsTensor tensor{parameter.weight.data(), parameter.gradient.data(), buffer, kCount, 0, 0};
  hsgd::lars_step(&tensor, 1, rule, 1);
}

constexpr ElementUpdate::Gradient kNone{nullptr, kCount};

TEST("an update is the kernel's, with the rule of each tensor's group and of the step") {
  Parameter one(1), two(2), expected_one(1), expected_two(2);
  ElementUpdate updates;
  updates.set_tensors(7,
                      {{one.weight.data(), one.buffer.data(), 1}, {two.weight.data(), nullptr, 0}});
  for (uint64_t version = 1; version <= 4; ++version) {
    const double lr = 0.1 / static_cast<double>(version);
    updates.set_rules(version, {rule_of(lr, 0), rule_of(2 * lr, 0.9)});
    CHECK(updates.update(version, 7, {one.its(), two.its()}));
    step_by_kernel(expected_one, rule_of(2 * lr, 0.9));
    step_by_kernel(expected_two, rule_of(lr, 0));
  }
  CHECK(one.weight == expected_one.weight && one.buffer == expected_one.buffer);
  CHECK(two.weight == expected_two.weight);
}

TEST("a layer may be one step behind the last rules, and a tensor may have no gradient") {
  Parameter one(1), same(1), expected(1);
  ElementUpdate updates;
  updates.set_tensors(0, {{one.weight.data(), one.buffer.data(), 0}, {nullptr, nullptr, 0}});
  for (uint64_t version = 1; version <= 3; ++version) {
    updates.set_rules(version, {rule_of(0.1 * static_cast<double>(version), 0.5)});
  }
  CHECK(updates.update(2, 0, {kNone, kNone}));
  CHECK(one.weight == same.weight);
  CHECK(updates.update(2, 0, {one.its(), kNone}));
  step_by_kernel(expected, rule_of(0.2, 0.5));
  CHECK(one.weight == expected.weight);
  CHECK(!updates.update(1, 0, {one.its(), kNone}));
}

TEST("without all that it needs it says no and changes nothing") {
  Parameter one(1), two(2);
  const Parameter same_one(1), same_two(2);
  ElementUpdate updates;
  const std::vector<ElementUpdate::Gradient> both = {one.its(), two.its()};
  CHECK(!updates.update(1, 0, both));
  updates.set_rules(1, {rule_of(0.1, 0.9)});
  CHECK(!updates.update(1, 0, both));
  const ElementUpdate::Tensor known{one.weight.data(), one.buffer.data(), 0};
  const std::vector<std::vector<ElementUpdate::Tensor>> lacking = {
      {known, {nullptr, nullptr, 0}},                      // a weight
      {known, {two.weight.data(), nullptr, 0}},            // a buffer
      {known, {two.weight.data(), two.buffer.data(), 1}},  // a rule
      {known}};
  for (const auto& tensors : lacking) {
    updates.set_tensors(0, tensors);
    CHECK(!updates.update(1, 0, both));
  }
  updates.set_tensors(0, {known, {two.weight.data(), two.buffer.data(), 0}});
  CHECK(!updates.update(2, 0, both) && !updates.update(1, 1, both));
  updates.forget();
  CHECK(!updates.update(1, 0, both));
  CHECK(one.weight == same_one.weight && two.weight == same_two.weight);
  hsgd::LarsRule adapts = rule_of(0.1, 0.9);
  adapts.adapt = true;
  CHECK_THROWS(updates.set_rules(2, {adapts}), "a trust ratio needs whole layers");
}

}  // namespace
