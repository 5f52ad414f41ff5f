// New weights without the program: SGD, whose update takes each element by itself.
//
// Owns what the program has told: where the tensors of a layer lie, and by which rules a step goes.
// Says no, and does nothing, where it has not been told enough. Any thread may call it. The formula
// is that of core/kernels/lars.hpp, without trust ratios. Never allocates tensors.
#ifndef HSGD_CORE_KERNELS_SGD_UPDATE_HPP_
#define HSGD_CORE_KERNELS_SGD_UPDATE_HPP_

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "core/kernels/lars.hpp"
#include "hsgd_core.h"

namespace hsgd {

class HSGD_API ElementUpdate {
 public:
  struct Tensor {
    float* weight;   // nullptr: not told
    float* buffer;   // of the momentum; nullptr: none
    uint32_t group;  // whose rule it follows
  };
  struct Gradient {
    const float* numbers;  // nullptr: there is none in this step
    uint64_t count;
  };

  // Tensors of a layer in the order of its gradients. They stay until forget() has returned.
  void set_tensors(uint32_t layer, std::vector<Tensor> tensors);
  void forget();
  // Of the step `version`, one for each group. Throws HSGD_ERR_ARGUMENT for rules with a ratio.
  void set_rules(uint64_t version, std::vector<LarsRule> rules);
  // The step `version` of a layer, in place. False: the program has to do it.
  bool update(uint64_t version, uint32_t layer, const std::vector<Gradient>& gradients);

 private:
  using Rules = std::vector<LarsRule>;
  static bool suffices(const Tensor& tensor, const Rules& rules);

  std::mutex mutex_;
  std::map<uint32_t, std::vector<Tensor>> tensors_;  // by layer
  std::map<uint64_t, Rules> rules_;                  // by version: the last two
};

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_SGD_UPDATE_HPP_
