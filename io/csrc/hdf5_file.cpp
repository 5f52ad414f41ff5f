// Source: HDF5 File Format Specification 3.0; B. Jenkins, lookup3 (public domain).
#include "hdf5_file.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>

namespace hsgd::io {
namespace {

uint32_t turned(uint32_t word, int by) { return word << by | word >> (32 - by); }

}  // namespace

uint32_t checksum(const uint8_t* bytes, size_t size) {
  uint32_t a = 0xdeadbeef + static_cast<uint32_t>(size);
  uint32_t b = a;
  uint32_t c = a;
  uint8_t last[12] = {};
  for (; size > 12; bytes += 12, size -= 12) {
    a += number_at<uint32_t>(bytes);
    b += number_at<uint32_t>(bytes + 4);
    c += number_at<uint32_t>(bytes + 8);
    a = (a - c) ^ turned(c, 4), c += b;
    b = (b - a) ^ turned(a, 6), a += c;
    c = (c - b) ^ turned(b, 8), b += a;
    a = (a - c) ^ turned(c, 16), c += b;
    b = (b - a) ^ turned(a, 19), a += c;
    c = (c - b) ^ turned(b, 4), b += a;
  }
  if (size == 0) return c;
  std::memcpy(last, bytes, size);
  a += number_at<uint32_t>(last);
  b += number_at<uint32_t>(last + 4);
  c += number_at<uint32_t>(last + 8);
  c = (c ^ b) - turned(b, 14);
  a = (a ^ c) - turned(c, 11);
  b = (b ^ a) - turned(a, 25);
  c = (c ^ b) - turned(b, 16);
  a = (a ^ c) - turned(c, 4);
  b = (b ^ a) - turned(a, 14);
  return (c ^ b) - turned(b, 24);
}

File::File(int file) : file_(file) { std::fill_n(numbers_, kPages, kUndefined); }

bool File::open(uint64_t file_bytes) {
  uint8_t bytes[96];
  end_ = std::min(file_bytes, uint64_t{1} << 62);
  if (!read(0, bytes, sizeof(bytes))) return false;
  if (std::memcmp(bytes, "\x89HDF\r\n\x1a\n", 8) != 0) return false;
  Cursor at(bytes + 8, sizeof(bytes) - 8);
  const unsigned version = at.byte();
  if (version > 3) return false;
  at.take(version < 2 ? 4 : 0);
  if (at.byte() != 8 || at.byte() != 8) return false;  // bytes of addresses and of lengths
  at.take(1);
  if (version < 2) {
    leaf_entries = 2 * at.next<uint16_t>();
    node_entries = 2 * at.next<uint16_t>();
    at.take(4);
    if (version == 1) {
      chunk_entries = 2 * at.next<uint16_t>();
      at.take(2);
    }
  }
  const uint64_t base = at.word();
  // Free space of the file, or an extension of this block.
  if (at.word() != kUndefined) return false;
  const uint64_t end = at.word();
  const bool has_driver = version < 2 && at.word() != kUndefined;
  if (base != 0 || has_driver || end > end_) return false;
  end_ = end;
  return true;
}

bool File::read(uint64_t address, uint8_t* to, uint64_t size) {
  if (!has(address, size)) return false;
  while (size > 0) {
    const uint64_t page = address / kPageBytes;
    const uint64_t inside = address % kPageBytes;
    const uint64_t slot = page % kPages;
    if (numbers_[slot] != page && !load(page)) return false;
    const uint64_t part = std::min(size, kPageBytes - inside);
    if (inside + part > lengths_[slot]) return false;
    std::memcpy(to, pages_[slot] + inside, part);
    to += part;
    address += part;
    size -= part;
  }
  return true;
}

bool File::load(uint64_t page) {
  const uint64_t slot = page % kPages;
  numbers_[slot] = kUndefined;
  uint64_t length = 0;
  while (length < kPageBytes) {
    const ssize_t got = pread(file_, pages_[slot] + length, kPageBytes - length,
                              static_cast<off_t>(page * kPageBytes + length));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0) break;
    length += static_cast<uint64_t>(got);
  }
  numbers_[slot] = page;
  lengths_[slot] = length;
  return true;
}

}  // namespace hsgd::io
