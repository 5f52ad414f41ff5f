// Moving bytes through rings, for all peers in turn.
#include "channels.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../driver/internal.hpp"

namespace simnccl {
namespace {

Ring* map_rings(int fd, int size) {
  void* data = ::mmap(nullptr, region_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return data == MAP_FAILED ? nullptr : static_cast<Ring*>(data);
}

// The bytes of a message from `done` on that lie in one piece: of its header, or of its data.
template <typename HeaderType, typename Data>
auto rest(HeaderType& header, Data* data, uint64_t done, size_t* bytes) {
  if (done < sizeof header) {
    *bytes = sizeof header - done;
    return reinterpret_cast<Data*>(&header) + done;
  }
  *bytes = header.bytes + sizeof header - done;
  return data + (done - sizeof header);
}

}  // namespace

Region::Region(int fd, int size) : rings_(map_rings(fd, size)), size_(size) {}

Region::~Region() {
  if (rings_ != nullptr) ::munmap(rings_, region_bytes(size_));
}

Transfers::Transfers(const Region& region, int rank, int size)
    : region_(region),
      rank_(rank),
      out_(static_cast<size_t>(size)),
      in_(static_cast<size_t>(size)) {}

void Transfers::send(int peer, const Header& header, const std::byte* data) {
  out_[static_cast<size_t>(peer)].push_back({header, {}, const_cast<std::byte*>(data), 0});
}

void Transfers::receive(int peer, const Header& header, std::byte* data) {
  in_[static_cast<size_t>(peer)].push_back({header, {}, data, 0});
}

bool Transfers::send_some(int peer) {
  auto& queue = out_[static_cast<size_t>(peer)];
  if (queue.empty()) return false;
  Message& message = queue.front();
  Ring& ring = region_.ring(rank_, peer);
  const uint64_t at = ring.written.load(std::memory_order_relaxed);
  const size_t space = kRingBytes - (at - ring.read.load(std::memory_order_acquire));
  size_t bytes = 0;
  const std::byte* from =
      rest<const Header, const std::byte>(message.header, message.data, message.done, &bytes);
  bytes = std::min({bytes, space, kRingBytes - at % kRingBytes});
  if (bytes == 0) return false;
  std::memcpy(ring.data + at % kRingBytes, from, bytes);
  ring.written.store(at + bytes, std::memory_order_release);
  message.done += bytes;
  if (message.done == sizeof message.header + message.header.bytes) queue.pop_front();
  return true;
}

bool Transfers::receive_some(int peer) {
  auto& queue = in_[static_cast<size_t>(peer)];
  if (queue.empty()) return false;
  Message& message = queue.front();
  Ring& ring = region_.ring(peer, rank_);
  const uint64_t at = ring.read.load(std::memory_order_relaxed);
  const size_t there = ring.written.load(std::memory_order_acquire) - at;
  size_t bytes = 0;
  std::byte* to = rest<Header, std::byte>(message.found, message.data, message.done, &bytes);
  bytes = std::min({bytes, there, kRingBytes - at % kRingBytes});
  if (bytes == 0) return false;
  std::memcpy(to, ring.data + at % kRingBytes, bytes);
  ring.read.store(at + bytes, std::memory_order_release);
  message.done += bytes;
  if (message.done == sizeof message.found && !matches(peer, message)) return false;
  if (message.done == sizeof message.header + message.header.bytes) queue.pop_front();
  return true;
}

bool Transfers::matches(int peer, const Message& message) {
  const Header& due = message.header;
  const Header& found = message.found;
  if (std::memcmp(&due, &found, sizeof due) == 0) return true;
  char text[160];
  std::snprintf(text, sizeof text,
                "rank %d waits for function %u, type %u, %llu bytes; rank %d sent %u, %u, %llu",
                rank_, due.function, due.type, static_cast<unsigned long long>(due.bytes), peer,
                found.function, found.type, static_cast<unsigned long long>(found.bytes));
  mismatch_ = text;
  simcuda::record_violation(mismatch_);
  return false;
}

bool Transfers::finished() const {
  const auto empty = [](const std::deque<Message>& queue) { return queue.empty(); };
  return std::all_of(out_.begin(), out_.end(), empty) && std::all_of(in_.begin(), in_.end(), empty);
}

bool Transfers::run(const std::function<bool()>& stop) {
  const auto size = static_cast<int>(out_.size());
  simcuda::Patience patience;
  while (!finished()) {
    if (stop()) return false;
    bool moved = false;
    for (int peer = 0; peer < size && mismatch_.empty(); ++peer) {
      moved = send_some(peer) || moved;
      moved = receive_some(peer) || moved;
    }
    if (moved) {
      patience = {};
    } else {
      patience.wait();
    }
  }
  return true;
}

}  // namespace simnccl
