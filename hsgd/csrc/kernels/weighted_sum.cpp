// The loop. Memory bounds it: wider registers gain little, so that it is compiled once.
#include "kernels/weighted_sum.hpp"

namespace hsgd {

int64_t weighted_sum(const int32_t* words, const int64_t* weights, uint64_t count) {
  uint64_t sum = 0;  // unsigned: it may overflow
  for (uint64_t i = 0; i < count; ++i) {
    const auto word = static_cast<uint64_t>(static_cast<int64_t>(words[i]));
    sum += word * static_cast<uint64_t>(weights[i]);
  }
  return static_cast<int64_t>(sum);
}

}  // namespace hsgd
