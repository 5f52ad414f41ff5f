// Messages between the ranks of a communicator, through rings in the memory that they share.
//
// Owns the layout of that memory: a ring for each pair of sender and receiver. A message has a
// header, by which a receiver notices that its peer does something else.
#ifndef SIMCUDA_NCCL_CHANNELS_HPP_
#define SIMCUDA_NCCL_CHANNELS_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace simnccl {

constexpr size_t kRingBytes = 1 << 16;

struct Ring {
  // Bytes since the beginning. Each is written by one side, with release after the bytes were
  // written or read, and read by the other with acquire: no byte is read before it is there, and
  // none is overwritten before it was read.
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::byte data[kRingBytes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "rings lie in shared memory");

inline size_t region_bytes(int size) {
  return sizeof(Ring) * static_cast<size_t>(size) * static_cast<size_t>(size);
}

// The mapping of one rank.
class Region {
 public:
  // Takes the descriptor.
  Region(int fd, int size);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();
  bool valid() const { return rings_ != nullptr; }
  Ring& ring(int from, int to) const { return rings_[from * size_ + to]; }

 private:
  Ring* rings_;
  const int size_;
};

struct Header {
  uint32_t function;  // that sends and receives it
  uint32_t type;
  uint64_t bytes;
};

// Messages that are under way at the same time. Those of one pair of ranks keep their order.
class Transfers {
 public:
  Transfers(const Region& region, int rank, int size);
  void send(int peer, const Header& header, const std::byte* data);
  void receive(int peer, const Header& header, std::byte* data);
  // Until all are done, or `stop` says so: then false. A message that is not what was to come stops
  // it for good, as it would NCCL; mismatch() says what was wrong.
  bool run(const std::function<bool()>& stop);
  const std::string& mismatch() const { return mismatch_; }

 private:
  struct Message {
    Header header;
    Header found;  // what the peer sent
    std::byte* data;
    uint64_t done;  // bytes of header and data
  };
  bool send_some(int peer);
  bool receive_some(int peer);
  bool matches(int peer, const Message& message);
  bool finished() const;

  const Region& region_;
  const int rank_;
  std::vector<std::deque<Message>> out_;  // by peer
  std::vector<std::deque<Message>> in_;
  std::string mismatch_;
};

}  // namespace simnccl

#endif  // SIMCUDA_NCCL_CHANNELS_HPP_
