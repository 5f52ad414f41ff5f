// The header of an HDF5 object: a group or a dataset.
#ifndef HSGD_IO_OBJECT_HEADER_H_
#define HSGD_IO_OBJECT_HEADER_H_

#include "hdf5_file.h"

namespace hsgd::io {

enum MessageType : unsigned {
  kNothing = 0x00,
  kShape = 0x01,
  kLinkInfo = 0x02,
  kLink = 0x06,
  kExternalFiles = 0x07,
  kLayout = 0x08,
  kGroupInfo = 0x0a,
  kFilters = 0x0b,
  kAttribute = 0x0c,
  kComment = 0x0d,
  kOldTime = 0x0e,
  kContinuation = 0x10,
  kSymbolTable = 0x11,
  kTime = 0x12,
  kAttributeInfo = 0x15,
  kReferences = 0x16,
};

struct Message {
  unsigned type;
  unsigned flags;
  const uint8_t* bytes;  // until the next message
  size_t size;
};

// Returns whether links, or attributes, lie in the header, of which kLinkInfo or kAttributeInfo
// tells.
bool is_compact(const Message& info);

// The messages of one object, in their order.
class Header {
 public:
  // Begins with the object at `address`; returns false for one that is left to HDF5.
  bool open(File* file, uint64_t address);

  bool ok() const { return ok_; }
  unsigned kind() const { return is_new_ ? (has_order_ ? 3 : 2) : 1; }

  // Returns false after the last message, and if the header is left to HDF5: then ok() is false.
  bool next(Message* message);

 private:
  static constexpr int kMostParts = 16;

  size_t head_bytes() const { return is_new_ ? (has_order_ ? 6 : 4) : 8; }

  bool open_old(uint64_t address, const uint8_t* prefix);
  bool open_new(uint64_t address, unsigned version, unsigned flags);

  // Reads a part with a checksum, whose messages begin after `skipped` bytes.
  bool load_new(uint64_t address, uint64_t size, uint64_t skipped);
  bool load_part();
  bool ends_well() const;
  bool take(Message* message);
  bool add_part(const Message& message);

  File* file_ = nullptr;
  Cursor at_;
  bool ok_ = false;
  bool is_new_ = false;
  bool has_order_ = false;    // each message has 2 bytes more
  bool has_nothing_ = false;  // a message of no type, in this part
  int64_t messages_ = 0;      // still to come, in the older form
  int parts_ = 0;             // that continuations name
  int taken_ = 0;
  uint64_t addresses_[kMostParts];
  uint64_t sizes_[kMostParts];
  uint8_t bytes_[kMostBytes];
};

}  // namespace hsgd::io

#endif  // HSGD_IO_OBJECT_HEADER_H_
