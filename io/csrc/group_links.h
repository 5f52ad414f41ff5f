// The links of HDF5 groups.
#ifndef HSGD_IO_GROUP_LINKS_H_
#define HSGD_IO_GROUP_LINKS_H_

#include <algorithm>
#include <string_view>

#include "object_header.h"
#include "rows.h"

namespace hsgd::io {

constexpr int64_t kMostSteps = 256;

// The steps from the group of a sample to its arrays, and the addresses found so far.
class Steps {
 public:
  Steps(const hsgd_io_step* steps, int64_t count) : steps_(steps), count_(count) {}

  void begin() { std::fill_n(addresses_, count_, kUndefined); }
  int64_t count() const { return count_; }
  int64_t field(int64_t step) const { return steps_[step].field; }
  uint64_t address(int64_t step) const { return addresses_[step]; }

  // Takes a link of the group to which step `parent` leads; returns false for the second of one
  // name.
  bool take(int64_t parent, std::string_view name, uint64_t address) {
    for (int64_t tried = 0; tried < count_; ++tried, ++guess_) {
      if (guess_ >= count_) guess_ = 0;
      const hsgd_io_step& step = steps_[guess_];
      const std::string_view own(step.name, static_cast<size_t>(step.name_bytes));
      if (step.parent != parent || own != name) continue;
      if (addresses_[guess_] != kUndefined) return false;
      addresses_[guess_++] = address;
      return true;
    }
    return true;
  }

 private:
  const hsgd_io_step* steps_;
  int64_t count_;
  int64_t guess_ = 0;  // links are in the order of names, as steps are
  uint64_t addresses_[kMostSteps];
};

// Memory for the parts of an older group.
struct GroupParts {
  uint8_t node[kMostBytes];
  uint8_t leaf[kMostBytes];
  uint8_t heap[kMostBytes];
};

// Takes the links of the group at `address`, to which step `parent` leads. Returns false for a
// group that is left to HDF5.
bool read_group(File* file, Header* header, GroupParts* parts, uint64_t address, int64_t parent,
                Steps* steps);

}  // namespace hsgd::io

#endif  // HSGD_IO_GROUP_LINKS_H_
