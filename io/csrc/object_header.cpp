// Source: HDF5 File Format Specification 3.0, section IV.A.
#include "object_header.h"

namespace hsgd::io {
namespace {

constexpr unsigned kPlainFlags = 0x05;  // constant, not shareable; others change the meaning

}  // namespace

bool is_compact(const Message& info) {
  Cursor at(info.bytes, info.size);
  const unsigned version = at.byte();
  const unsigned flags = at.byte();
  if (version != 0 || (flags & ~3U) != 0) return false;
  if ((flags & 1) != 0) {  // the next number in the order of creation
    const unsigned wide = info.type == kLinkInfo ? 8 : 2;
    if (at.number(wide) > INT64_MAX) return false;
  }
  for (int tree = 0; tree < ((flags & 2) != 0 ? 3 : 2); ++tree) {
    if (at.word() != kUndefined) return false;
  }
  return at.ok();
}

bool Header::open(File* file, uint64_t address) {
  file_ = file;
  parts_ = taken_ = 0;
  messages_ = 0;
  has_nothing_ = has_order_ = false;
  uint8_t prefix[16];
  ok_ = file->read(address, prefix, sizeof(prefix));
  if (!ok_) return false;
  is_new_ = std::memcmp(prefix, "OHDR", 4) == 0;
  ok_ = is_new_ ? open_new(address, prefix[4], prefix[5]) : open_old(address, prefix);
  return ok_;
}

bool Header::next(Message* message) {
  for (;;) {
    while (ok_ && at_.left() < head_bytes()) {
      if (taken_ == parts_) {
        ok_ = ends_well() && messages_ == 0;
        return false;
      }
      ok_ = ends_well() && load_part();
    }
    ok_ = ok_ && take(message);
    if (ok_ && message->type == kContinuation) {
      ok_ = add_part(*message);
    } else if (ok_ && message->type == kNothing) {
      has_nothing_ = true;
    } else {
      return ok_;
    }
  }
}

// Only the newer form may have a gap instead of a message.
bool Header::ends_well() const { return at_.left() == 0 || (is_new_ && !has_nothing_); }

bool Header::open_old(uint64_t address, const uint8_t* prefix) {
  Cursor at(prefix, 16);
  const unsigned version = at.byte();
  at.take(1);
  messages_ = at.next<uint16_t>();
  const uint32_t references = at.next<uint32_t>();
  const uint32_t size = at.next<uint32_t>();
  if (version != 1 || references != 1 || size > kMostBytes) return false;
  if (!file_->read(address + 16, bytes_, size)) return false;
  at_ = Cursor(bytes_, size);
  return true;
}

bool Header::open_new(uint64_t address, unsigned version, unsigned flags) {
  if (version != 2 || (flags & ~0x3fU) != 0) return false;
  has_order_ = (flags & 0x04) != 0;
  const size_t before = 6 + ((flags & 0x20) != 0 ? 16 : 0) + ((flags & 0x10) != 0 ? 4 : 0);
  const unsigned wide = 1U << (flags & 3);
  uint8_t start[6 + 16 + 4 + 8];
  if (!file_->read(address, start, before + wide)) return false;
  if ((flags & 0x10) != 0) {  // most attributes in the header, fewest outside of it
    const auto most = number_at<uint16_t>(start + before - 4);
    if (most < number_at<uint16_t>(start + before - 2)) return false;
  }
  const uint64_t size = Cursor(start + before, wide).number(wide);
  const uint64_t skipped = before + wide;
  if (size > kMostBytes - skipped - 4) return false;
  return load_new(address, skipped + size + 4, skipped);
}

bool Header::load_new(uint64_t address, uint64_t size, uint64_t skipped) {
  if (size < skipped + 4 || size > kMostBytes || !file_->read(address, bytes_, size)) return false;
  if (checksum(bytes_, size - 4) != number_at<uint32_t>(bytes_ + size - 4)) return false;
  at_ = Cursor(bytes_ + skipped, size - 4 - skipped);
  return true;
}

bool Header::load_part() {
  const uint64_t address = addresses_[taken_];
  const uint64_t size = sizes_[taken_];
  ++taken_;
  has_nothing_ = false;
  if (is_new_) return load_new(address, size, 4) && std::memcmp(bytes_, "OCHK", 4) == 0;
  if (size == 0 || size > kMostBytes || !file_->read(address, bytes_, size)) return false;
  at_ = Cursor(bytes_, size);
  return true;
}

bool Header::take(Message* message) {
  message->type = is_new_ ? at_.byte() : at_.next<uint16_t>();
  message->size = at_.next<uint16_t>();
  message->flags = at_.byte();
  at_.take(head_bytes() - (is_new_ ? 4 : 5));
  message->bytes = at_.take(message->size);
  if (!at_.ok() || (message->flags & ~kPlainFlags) != 0) return false;
  return is_new_ || (message->size % 8 == 0 && messages_-- > 0);
}

bool Header::add_part(const Message& message) {
  Cursor at(message.bytes, message.size);
  if (parts_ == kMostParts) return false;
  addresses_[parts_] = at.word();
  sizes_[parts_] = at.word();
  ++parts_;
  return at.ok();
}

}  // namespace hsgd::io
