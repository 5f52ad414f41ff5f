// Decoders of HDF5 filters. Sources: lzf_decompress of liblzf (M. Lehmann), H5_checksum_fletcher32
// and H5Z__filter_shuffle of HDF5.
#include <algorithm>
#include <cstring>

#include "rows.h"

namespace {

constexpr int64_t kFoldWords = 360;  // the most whose sums fit 32 bits
constexpr int64_t kLiterals = 32;    // the longest run of bytes as they are in LZF
constexpr int64_t kWord = 8;
constexpr int64_t kItems = 4096;  // of a part that stays in the CPU's cache

uint32_t fold(uint32_t sum) { return (sum & 0xffff) + (sum >> 16); }

// A fixed item size lets the compiler use vectors.
template <int64_t kItem>
void unshuffle(const unsigned char* from, int64_t items, unsigned char* to) {
  for (int64_t n = 0; n < items; ++n) {
    for (int64_t k = 0; k < kItem; ++k) to[n * kItem + k] = from[k * items + n];
  }
}

void unshuffle_any(const unsigned char* from, int64_t items, int64_t item, unsigned char* to) {
  for (int64_t low = 0; low < items; low += kItems) {
    const int64_t high = std::min(items, low + kItems);
    for (int64_t k = 0; k < item; ++k) {
      for (int64_t n = low; n < high; ++n) to[n * item + k] = from[k * items + n];
    }
  }
}

}  // namespace

int64_t hsgd_io_lzf(const void* source, int64_t size, void* target, int64_t room) {
  const auto* from = static_cast<const unsigned char*>(source);
  const unsigned char* const end = from + size;
  auto* const begin = static_cast<unsigned char*>(target);
  unsigned char* to = begin;
  while (from < end) {
    const int64_t control = *from++;
    int64_t count = control >> 5;
    if (count == 0) {  // bytes as they are
      count = control + 1;
      if (count > end - from || count > room - (to - begin)) return -1;
      if (end - from >= kLiterals && room - (to - begin) >= kLiterals) {
        std::memcpy(to, from, kLiterals);  // too many, but of a fixed size
      } else {
        std::memcpy(to, from, static_cast<size_t>(count));
      }
      from += count;
      to += count;
      continue;
    }
    if (end - from < (count == 7 ? 2 : 1)) return -1;
    if (count == 7) count += *from++;
    count += 2;
    const int64_t back = ((control & 0x1f) << 8) + *from++ + 1;
    if (back > to - begin || count > room - (to - begin)) return -1;
    if (back >= kWord && room - (to - begin) >= count + kWord) {
      for (int64_t n = 0; n < count; n += kWord) std::memcpy(to + n, to + n - back, kWord);
      to += count;
    } else {  // may repeat what it writes
      for (; count > 0; --count, ++to) *to = to[-back];
    }
  }
  return to - begin;
}

uint32_t hsgd_io_fletcher32(const void* source, int64_t size) {
  const auto* from = static_cast<const unsigned char*>(source);
  uint32_t first = 0;
  uint32_t second = 0;
  for (int64_t words = size / 2; words > 0;) {
    const int64_t part = std::min(words, kFoldWords);
    words -= part;
    for (int64_t n = 0; n < part; ++n, from += 2) {
      first += static_cast<uint32_t>(from[0]) << 8 | from[1];
      second += first;
    }
    first = fold(first);
    second = fold(second);
  }
  if (size % 2 != 0) {
    first = fold(first + (static_cast<uint32_t>(*from) << 8));
    second = fold(second + first);
  }
  return fold(second) << 16 | fold(first);
}

void hsgd_io_unshuffle(const void* source, int64_t size, int64_t item, void* target) {
  const auto* from = static_cast<const unsigned char*>(source);
  auto* to = static_cast<unsigned char*>(target);
  const int64_t items = size / item;
  if (item == 2) {
    unshuffle<2>(from, items, to);
  } else if (item == 4) {
    unshuffle<4>(from, items, to);
  } else if (item == 8) {
    unshuffle<8>(from, items, to);
  } else {
    unshuffle_any(from, items, item, to);
  }
  const int64_t whole = items * item;
  std::memcpy(to + whole, from + whole, static_cast<size_t>(size - whole));
}
