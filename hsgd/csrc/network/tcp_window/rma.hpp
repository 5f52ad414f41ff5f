// make_socket_rma(): one-sided writes over TCP, with one connection per direction and pair, made at
// the first write.
//
// Owns the connections and a thread that sleeps until it can read or write. An operation is done
// when its target has stored the version. If a connection ends, its rank is lost, and writes to the
// others continue. Never retries a write.
#ifndef HSGD_NETWORK_TCP_WINDOW_RMA_HPP_
#define HSGD_NETWORK_TCP_WINDOW_RMA_HPP_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/rank_names.hpp"
#include "network/tcp_common/listener.hpp"
#include "network/transport/rma.hpp"

namespace hsgd {

struct SocketSettings {
  // true: operations to a lost rank, open or later, are dropped. false: the loss is an error of
  // every later operation.
  bool forgiving;
  uint64_t slice_bytes;  // see SocketSender
  // Time for the hello of a new connection. Ranks send it at once; the limit is longer because one
  // may be stopped.
  double hello_s = 10.0;
  // Deadline of waiting callers; a host that does not answer is given up after a part of it.
  double timeout_s = 0.0;  // 0: as the kernel does
  // Which ranks connect here, by rank. Empty: all others; ranks of one node share its memory.
  std::vector<bool> connect = {};
  RankNames names = {};
};

// Local. Other ranks write into the `bytes` bytes at `base`.
std::unique_ptr<Rma> make_socket_rma(SocketListener listener, std::vector<SocketPlace> places,
                                     int rank, void* base, size_t bytes,
                                     const SocketSettings& settings);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_RMA_HPP_
