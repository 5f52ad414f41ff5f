// One-sided writes over TCP: one connection per direction and pair, made at the first write.
//
// Owns the connections and a thread that sleeps until there is something to read or room to write.
// Data is done when the kernel has it, a version when its target has stored it. A rank whose
// connection ends is lost, and writes to the others go on. Never retries, and knows nothing of
// slots but that a version is one store.
#ifndef HSGD_RMA_SOCKETS_HPP_
#define HSGD_RMA_SOCKETS_HPP_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "rma.hpp"
#include "segment.hpp"

namespace hsgd {

// Where a rank can be reached: what all ranks tell one another at set-up, byte by byte.
struct SocketPlace {
  struct Address {
    uint32_t host;  // IPv4, network order; 0: none
    uint32_t mask;
  };
  std::array<Address, 8> addresses;
  std::array<uint8_t, 16> token;  // who does not know it is no rank
  uint32_t port;                  // network order
  uint32_t reserved;
};
static_assert(sizeof(SocketPlace) == 88, "is exchanged as bytes");

class SocketListener {
 public:
  SocketListener();  // throws HSGD_ERR_SYSTEM
  const SocketPlace& place() const { return place_; }
  Fd take() { return std::move(fd_); }

 private:
  Fd fd_;
  SocketPlace place_{};
};

struct SocketSettings {
  // What is open to a rank that is lost is dropped, and so is what is put later; else it is an
  // error of all that follows.
  bool forgiving;
  uint64_t slice_bytes;  // see SocketSender
};

// Local. Writes of others go into the `bytes` bytes at `base`.
std::unique_ptr<Rma> make_socket_rma(SocketListener listener, std::vector<SocketPlace> places,
                                     int rank, void* base, size_t bytes,
                                     const SocketSettings& settings);

}  // namespace hsgd

#endif  // HSGD_RMA_SOCKETS_HPP_
