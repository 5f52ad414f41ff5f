// hsgd_io_crc32c(): computes CRC-32C with three parallel streams of the SSE 4.2 instruction if the
// processor has it, else with tables made by the compiler.
//
// Method: M. Adler, crc32c.c (2013): the CRCs of three neighbouring parts are computed side by
// side, which hides the latency of the instruction, and are joined by shifting a CRC over zeros.
#include <array>
#include <cstring>

#include "rows.h"

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
constexpr int64_t kPart = 2048;               // bytes of each of the three streams

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (uint32_t n = 0; n < 256; ++n) {
    uint32_t crc = n;
    for (int k = 0; k < 8; ++k) crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[0][n] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t n = 0; n < 256; ++n) {
      table[k][n] = (table[k - 1][n] >> 8) ^ table[0][table[k - 1][n] & 0xff];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

uint64_t load(const unsigned char* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Computes eight bytes per step ("slicing by 8"). Little-endian, as all of hsgd.
uint32_t by_table(uint32_t crc, const unsigned char* from, int64_t count) {
  for (; count >= 8; count -= 8, from += 8) {
    const uint64_t word = load(from) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; count > 0; --count) crc = (crc >> 8) ^ kTable[0][(crc ^ *from++) & 0xff];
  return crc;
}

#if defined(__x86_64__)

using Shift = std::array<std::array<uint32_t, 256>, 4>;

// Returns tables that shift a CRC over kPart zero bytes. The operator is linear: its columns are
// the images of single bits, each shifted over the zeros one byte at a time.
constexpr Shift make_shift() {
  std::array<uint32_t, 32> column{};
  for (size_t bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (int64_t k = 0; k < kPart; ++k) crc = (crc >> 8) ^ kTable[0][crc & 0xff];
    column[bit] = crc;
  }
  Shift shift{};
  for (size_t byte = 0; byte < 4; ++byte) {
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t crc = 0;
      for (size_t bit = 0; bit < 8; ++bit) {
        if ((n >> bit & 1) != 0) crc ^= column[8 * byte + bit];
      }
      shift[byte][n] = crc;
    }
  }
  return shift;
}

constexpr Shift kShift = make_shift();

uint32_t over_zeros(uint64_t crc) {
  return kShift[0][crc & 0xff] ^ kShift[1][crc >> 8 & 0xff] ^ kShift[2][crc >> 16 & 0xff] ^
         kShift[3][crc >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t start, const unsigned char* from,
                                                          int64_t count) {
  uint64_t crc = start;
  for (; count >= 3 * kPart; count -= 3 * kPart, from += 3 * kPart) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (int64_t at = 0; at < kPart; at += 8) {
      crc = __builtin_ia32_crc32di(crc, load(from + at));
      second = __builtin_ia32_crc32di(second, load(from + kPart + at));
      third = __builtin_ia32_crc32di(third, load(from + 2 * kPart + at));
    }
    crc = over_zeros(crc) ^ second;
    crc = over_zeros(crc) ^ third;
  }
  for (; count >= 8; count -= 8, from += 8) crc = __builtin_ia32_crc32di(crc, load(from));
  auto rest = static_cast<uint32_t>(crc);
  for (; count > 0; --count) rest = __builtin_ia32_crc32qi(rest, *from++);
  return rest;
}

#endif

}  // namespace

extern "C" uint32_t hsgd_io_crc32c(uint32_t crc, const void* bytes, int64_t count) {
  const auto* from = static_cast<const unsigned char*>(bytes);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(~crc, from, count);
#endif
  return ~by_table(~crc, from, count);
}
