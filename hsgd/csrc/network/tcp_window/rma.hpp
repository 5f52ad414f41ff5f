// One-sided writes over TCP: one connection per direction and pair, made at the first write.
//
// Owns the connections and a thread that sleeps until there is something to read or room to write.
// An operation is done when its target has stored the version. A rank whose connection ends is
// lost, and writes to the others go on. Never retries, and knows nothing of slots but that a
// version is one store.
#ifndef HSGD_NETWORK_TCP_WINDOW_RMA_HPP_
#define HSGD_NETWORK_TCP_WINDOW_RMA_HPP_

#include <cstdint>
#include <memory>
#include <vector>

#include "network/tcp_common/listener.hpp"
#include "network/transport/rma.hpp"

namespace hsgd {

struct SocketSettings {
  // What is open to a rank that is lost is dropped, and so is what is put later; else it is an
  // error of all that follows.
  bool forgiving;
  uint64_t slice_bytes;  // see SocketSender
  // Who comes in says hello within so long. Ranks do at once; longer, because one may be stopped.
  double hello_s = 10.0;
  // The deadline of those who wait: in proportion to it a host that does not answer is given up.
  double timeout_s = 0.0;  // 0: as the kernel does
  // By rank, which of them connect here. Empty: all the others; ranks of one node have its memory.
  std::vector<bool> connect = {};
};

// Local. Writes of others go into the `bytes` bytes at `base`.
std::unique_ptr<Rma> make_socket_rma(SocketListener listener, std::vector<SocketPlace> places,
                                     int rank, void* base, size_t bytes,
                                     const SocketSettings& settings);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_RMA_HPP_
