// Cuts elements into equal parts on cache lines.
#include "network/rounds/reduction.hpp"

#include <algorithm>

#include "node/segments/segment_layout.hpp"

namespace hsgd {

Range part_of(uint64_t count, int parts, int index, size_t element_bytes) {
  const uint64_t line = std::max<uint64_t>(1, kLine / element_bytes);
  const auto bound = [&](int i) {
    if (i == parts) return count;
    const uint64_t exact = count / static_cast<uint64_t>(parts) * static_cast<uint64_t>(i) +
                           count % static_cast<uint64_t>(parts) * static_cast<uint64_t>(i) /
                               static_cast<uint64_t>(parts);
    return std::min(count, round_up(exact, line));
  };
  return {bound(index), bound(index + 1)};
}

}  // namespace hsgd
