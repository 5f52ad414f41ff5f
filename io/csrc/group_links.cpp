// Source: HDF5 File Format Specification 3.0, sections III.A.1, III.B to D, IV.A.2.
#include "group_links.h"

namespace hsgd::io {
namespace {

// The names of an older group.
class Heap {
 public:
  bool open(File* file, uint8_t* memory, uint64_t address) {
    uint8_t bytes[32];
    bytes_ = memory;
    if (!file->read(address, bytes, sizeof(bytes))) return false;
    Cursor at(bytes, sizeof(bytes));
    if (!at.is("HEAP") || at.byte() != 0) return false;
    at.take(3);
    size_ = at.word();
    uint64_t free = at.word();
    if (size_ > kMostBytes || !file->read(at.word(), memory, size_)) return false;
    for (uint64_t blocks = 0; free != 1; ++blocks) {  // 1: no more
      if (size_ < 16 || free > size_ - 16 || blocks > size_ / 16) return false;
      const auto next = number_at<uint64_t>(bytes_ + free);
      const auto length = number_at<uint64_t>(bytes_ + free + 8);
      if (next == 0 || length > size_ - free) return false;
      free = next;
    }
    return true;
  }

  bool find(uint64_t offset, std::string_view* name) const {
    if (offset >= size_) return false;
    const auto* start = reinterpret_cast<const char*>(bytes_ + offset);
    *name = {start, strnlen(start, size_ - offset)};
    return name->size() < size_ - offset;
  }

 private:
  const uint8_t* bytes_ = nullptr;
  uint64_t size_ = 0;
};

// Takes the links of a leaf; HDF5 finds them only if their names ascend, from after `low` to
// `high`.
bool take_leaf(File* file, GroupParts* parts, uint64_t address, const Heap& heap,
               std::string_view low, std::string_view high, int64_t parent, Steps* steps) {
  const uint64_t all = 8 + 40 * file->leaf_entries;
  if (all > kMostBytes || !file->read(address, parts->leaf, all)) return false;
  Cursor at(parts->leaf, all);
  if (!at.is("SNOD") || at.byte() != 1) return false;
  at.take(1);
  const unsigned entries = at.next<uint16_t>();
  if (entries > file->leaf_entries) return false;
  for (unsigned entry = 0; entry < entries; ++entry) {
    std::string_view name;
    if (!heap.find(at.word(), &name) || !(low < name) || high < name) return false;
    const uint64_t target = at.word();
    const uint32_t cached = at.next<uint32_t>();
    at.take(20);
    if (cached > 1 || !at.ok()) return false;  // 2: a soft link
    if (!steps->take(parent, name, target)) return false;
    low = name;
  }
  return true;
}

// Takes the links of an older group, whose tree has one level.
bool take_tree(File* file, GroupParts* parts, uint64_t tree, uint64_t heap_address, int64_t parent,
               Steps* steps) {
  const uint64_t most = file->node_entries;
  const uint64_t all = 24 + 8 * most + 8 * (most + 1);
  if (all > kMostBytes || !file->read(tree, parts->node, all)) return false;
  Cursor at(parts->node, all);
  if (!at.is("TREE") || at.byte() != 0 || at.byte() != 0) return false;
  const unsigned entries = at.next<uint16_t>();
  if (entries > most || at.word() != kUndefined || at.word() != kUndefined) return false;
  Heap heap;
  std::string_view low;
  if (!heap.open(file, parts->heap, heap_address) || !heap.find(at.word(), &low)) return false;
  for (unsigned entry = 0; entry < entries; ++entry) {
    const uint64_t leaf = at.word();
    std::string_view high;
    if (!heap.find(at.word(), &high) || !(low < high)) return false;
    if (!take_leaf(file, parts, leaf, heap, low, high, parent, steps)) return false;
    low = high;
  }
  return at.ok();
}

bool take_link(const Message& message, int64_t parent, Steps* steps) {
  Cursor at(message.bytes, message.size);
  if (at.byte() != 1) return false;
  const unsigned flags = at.byte();
  if ((flags & ~0x1fU) != 0) return false;
  if ((flags & 0x08) != 0 && at.byte() != 0) return false;  // no hard link
  if ((flags & 0x04) != 0) at.take(8);
  if ((flags & 0x10) != 0 && at.byte() > 1) return false;
  const uint64_t size = at.number(1U << (flags & 3));
  const auto* start = reinterpret_cast<const char*>(at.take(size));
  const uint64_t target = at.word();
  if (!at.ok() || size == 0 || strnlen(start, size) < size) return false;
  return steps->take(parent, {start, size}, target);
}

}  // namespace

bool read_group(File* file, Header* header, GroupParts* parts, uint64_t address, int64_t parent,
                Steps* steps) {
  if (!header->open(file, address)) return false;
  int infos = 0;
  int tables = 0;
  int links = 0;
  uint64_t tree = 0;
  uint64_t heap = 0;
  Message message;
  while (header->next(&message)) {
    switch (message.type) {
      case kLinkInfo:
        ++infos;
        if (!is_compact(message)) return false;
        break;
      case kLink:
        ++links;
        if (!take_link(message, parent, steps)) return false;
        break;
      case kSymbolTable: {
        Cursor at(message.bytes, message.size);
        ++tables;
        tree = at.word();
        heap = at.word();
        if (!at.ok()) return false;
        break;
      }
      case kAttributeInfo:
        if (!is_compact(message)) return false;
        break;
      case kGroupInfo:
      case kAttribute:
      case kComment:
      case kOldTime:
      case kTime:
        break;
      default:
        return false;
    }
  }
  if (!header->ok() || infos + tables != 1) return false;
  if (infos == 1) return true;
  return links == 0 && take_tree(file, parts, tree, heap, parent, steps);
}

}  // namespace hsgd::io
