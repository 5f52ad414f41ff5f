// Makes shared buffers and finds the one in which an address lies.
#include "node/segments/symmetric_memory.hpp"

#include <unistd.h>

#include "node/rendezvous/bootstrap.hpp"

namespace hsgd {

SharedBuffer::SharedBuffer(uint64_t id, int rank, const std::vector<int>& names, size_t bytes,
                           size_t available, const std::string& path, const Deadline& deadline)
    : id_(id), rank_(rank), memory_(rank, static_cast<int>(names.size()), bytes, bytes) {
  constexpr size_t kSmall = 1 << 30;  // for more, page tables of all ranks would be too large
  Member self;
  self.pid = ::getpid();
  self.settings = bytes;
  meet(path, nullptr, rank, names, std::move(self), memory_.bring("ask for less", available),
       deadline);
  memory_.complete(kSmall);
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
