// RankNames: the numbers by which errors call the ranks of a communicator; see hsgd_options.
//
// Names enter where a text or an Error is made, and nowhere else: Error::rank(), the sides of a
// mismatch and the texts have names from then on. What comes from another rank, through shared
// memory or a message, has them already and is passed on unchanged.
#ifndef HSGD_CORE_BASE_RANK_NAMES_HPP_
#define HSGD_CORE_BASE_RANK_NAMES_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hsgd {

class RankNames {
 public:
  RankNames() = default;  // the ranks themselves
  // Copies the names of `size` ranks; nullptr: the ranks themselves, for which it keeps no table.
  RankNames(const int32_t* names, int size) {
    int same = 0;
    while (names != nullptr && same < size && names[same] == same) ++same;
    if (names != nullptr && same < size)
      table_ = std::make_shared<const std::vector<int32_t>>(names, names + size);
  }
  // Returns the name of a rank; -1 for -1, which is no rank.
  int of(int rank) const {
    return table_ == nullptr || rank < 0 ? rank : (*table_)[static_cast<size_t>(rank)];
  }
  // Returns the rank with this name; -1: none.
  int rank_of(int name) const {
    if (table_ == nullptr) return name;
    const auto found = std::find(table_->begin(), table_->end(), name);
    return found == table_->end() ? -1 : static_cast<int>(found - table_->begin());
  }
  // Returns the table; nullptr for the ranks themselves.
  const int32_t* data() const { return table_ == nullptr ? nullptr : table_->data(); }

 private:
  std::shared_ptr<const std::vector<int32_t>> table_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_RANK_NAMES_HPP_
