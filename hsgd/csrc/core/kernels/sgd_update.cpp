#include "core/kernels/sgd_update.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "core/kernels/lars.hpp"

namespace hsgd {

void ElementUpdate::set_tensors(uint32_t layer, std::vector<Tensor> tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tensors_[layer] = std::move(tensors);
}

void ElementUpdate::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);  // no update is in progress then
  tensors_.clear();
}

void ElementUpdate::set_rules(uint64_t version, Rules rules) {
  if (std::any_of(rules.begin(), rules.end(), [](const auto& rule) { return rule.adapt; })) {
    throw_invalid("Tree: a rule with a trust ratio needs whole layers");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  rules_[version] = std::move(rules);
  // A layer may be at most one step behind the others: the gradient of its next step needs its
  // weights of the last one.
  rules_.erase(rules_.begin(), rules_.lower_bound(version - std::min<uint64_t>(version, 1)));
}

bool ElementUpdate::suffices(const Tensor& tensor, const Rules& rules) {
  return tensor.weight != nullptr && tensor.group < rules.size() &&
         (tensor.buffer != nullptr || rules[tensor.group].momentum == 0);
}

bool ElementUpdate::update(uint64_t version, uint32_t layer,
                           const std::vector<Gradient>& gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = tensors_.find(layer);
  const auto rules = rules_.find(version);
  if (known == tensors_.end() || rules == rules_.end()) return false;
  const std::vector<Tensor>& tensors = known->second;
  if (tensors.size() != gradients.size()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (gradients[i].numbers != nullptr && !suffices(tensors[i], rules->second)) return false;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (gradients[i].numbers == nullptr) continue;
    const LarsRule& rule = rules->second[tensors[i].group];
    float* buffer = rule.momentum == 0 ? nullptr : tensors[i].buffer;
    LarsTensor tensor{tensors[i].weight, gradients[i].numbers, buffer, gradients[i].count, 0, 0};
    lars_step(&tensor, 1, rule, 1);
  }
  return true;
}

}  // namespace hsgd
