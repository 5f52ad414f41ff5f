// Making shared buffers and finding the one that an address lies in.
#include "node/symmetric_memory.hpp"

#include <unistd.h>

#include "rendezvous/bootstrap.hpp"

namespace hsgd {

SharedBuffer::SharedBuffer(uint64_t id, int rank, int size, size_t bytes, size_t available)
    : id_(id), rank_(rank), bytes_(bytes), segments_(static_cast<size_t>(size)) {
  segments_[static_cast<size_t>(rank)] =
      Segment::create(bytes, static_cast<size_t>(size), "ask for less", available);
}

void SharedBuffer::share(const std::string& path, int world_rank, bool in_a_row,
                         const Deadline& deadline) {
  Segment& own = segments_[static_cast<size_t>(rank_)];
  const auto size = static_cast<int>(segments_.size());
  Member self;
  self.pid = ::getpid();
  self.world_rank = world_rank;
  self.settings = bytes_;
  self.segment = Fd::duplicate(own.fd());
  std::vector<Member> members = meet(path, nullptr, rank_, size, std::move(self), deadline);
  for (int peer = 0; peer < size; ++peer) {
    Segment& segment = segments_[static_cast<size_t>(peer)];
    if (peer != rank_) {
      segment = Segment::attach(std::move(members[static_cast<size_t>(peer)].segment), bytes_);
    }
  }
  if (in_a_row) row_ = Row(segments_);
  for (Segment& segment : segments_) segment.forget_file();
}

void Arena::add(const std::shared_ptr<SharedBuffer>& buffer) {
  for (auto entry = buffers_.begin(); entry != buffers_.end();) {
    entry = entry->second.expired() ? buffers_.erase(entry) : std::next(entry);
  }
  buffers_[buffer->own()] = buffer;
}

std::shared_ptr<SharedBuffer> Arena::find(const void* data, size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(data);
  const auto after = buffers_.upper_bound(address);
  if (after == buffers_.begin()) return nullptr;
  std::shared_ptr<SharedBuffer> buffer = std::prev(after)->second.lock();
  if (buffer == nullptr || address + bytes > buffer->own() + buffer->bytes()) return nullptr;
  return buffer;
}

}  // namespace hsgd
