// The bytes of an HDF5 file, read without HDF5.
//
// They may be damaged or hostile: every length and address is checked against its buffer and the
// file. Never allocates and never throws.
#ifndef HSGD_IO_HDF5_FILE_H_
#define HSGD_IO_HDF5_FILE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hsgd::io {

constexpr uint64_t kUndefined = ~uint64_t{0};  // no address
constexpr size_t kMostBytes = 8192;            // of what is read at once

template <typename Number>
Number number_at(const uint8_t* bytes) {  // little-endian, as all processors of hsgd are
  Number found;
  std::memcpy(&found, bytes, sizeof(found));
  return found;
}

// Reads numbers from some bytes; after what they do not hold, `ok` is false and numbers are 0.
class Cursor {
 public:
  Cursor(const uint8_t* from, size_t size) : at_(from), end_(from + size) {}
  Cursor() : Cursor(nullptr, 0) {}

  size_t left() const { return static_cast<size_t>(end_ - at_); }
  bool ok() const { return ok_; }

  // Returns the next `size` bytes, or NULL.
  const uint8_t* take(uint64_t size) {
    if (!ok_ || size > left()) {
      ok_ = false;
      return nullptr;
    }
    const uint8_t* found = at_;
    at_ += size;
    return found;
  }

  template <typename Number>
  Number next() {
    const uint8_t* found = take(sizeof(Number));
    return found == nullptr ? 0 : number_at<Number>(found);
  }
  unsigned byte() { return next<uint8_t>(); }
  uint64_t word() { return next<uint64_t>(); }

  // Returns a number of 1 to 8 bytes.
  uint64_t number(unsigned size) {
    uint64_t found = 0;
    const uint8_t* bytes = take(size);
    if (bytes != nullptr) std::memcpy(&found, bytes, size);
    return found;
  }

  bool is(const char* signature) {
    const uint8_t* found = take(4);
    return found != nullptr && std::memcmp(found, signature, 4) == 0;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  bool ok_ = true;
};

// Returns HDF5's checksum of metadata: hashlittle() of lookup3 by B. Jenkins, begun with 0.
uint32_t checksum(const uint8_t* bytes, size_t size);

// An open file, with the pages that were read last.
class File {
 public:
  explicit File(int file);

  // Reads the superblock; returns false for a file that is left to HDF5.
  bool open(uint64_t file_bytes);

  bool has(uint64_t address, uint64_t size) const { return size <= end_ && address <= end_ - size; }

  // Returns false if the file has not all these bytes, or cannot be read.
  bool read(uint64_t address, uint8_t* to, uint64_t size);

  // The most entries of nodes of trees, which HDF5 reads whole.
  uint64_t leaf_entries = 8;
  uint64_t node_entries = 32;
  uint64_t chunk_entries = 64;

 private:
  static constexpr uint64_t kPageBytes = 4096;
  static constexpr uint64_t kPages = 8;

  bool load(uint64_t page);

  int file_;
  uint64_t end_ = 0;
  uint64_t numbers_[kPages];  // of the pages that are here
  uint64_t lengths_[kPages];
  uint8_t pages_[kPages][kPageBytes];
};

}  // namespace hsgd::io

#endif  // HSGD_IO_HDF5_FILE_H_
