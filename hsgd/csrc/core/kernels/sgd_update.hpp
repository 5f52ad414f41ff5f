// ElementUpdate: computes new weights by plain SGD, without the program's optimizer.
//
// Holds what the program has set: the tensors of each layer and the rules of each step. Returns
// false and does nothing if something is missing. Any thread may call it. The formula is that of
// core/kernels/lars.hpp, without trust ratios. Never allocates tensors.
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
    float* weight;   // nullptr: not set
    float* buffer;   // of the momentum; nullptr: none
    uint32_t group;  // the group whose rule applies
  };
  struct Gradient {
    const float* numbers;  // nullptr: no gradient in this step
    uint64_t count;
  };

  // Sets the tensors of a layer, in the order of its gradients. They must stay valid until forget()
  // has returned.
  void set_tensors(uint32_t layer, std::vector<Tensor> tensors);
  void forget();
  // Sets the rules of the step `version`, one for each group. Throws HSGD_ERR_ARGUMENT for rules
  // with a ratio.
  void set_rules(uint64_t version, std::vector<LarsRule> rules);
  // Does the step `version` of a layer, in place. Returns false if the program has to do it.
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
