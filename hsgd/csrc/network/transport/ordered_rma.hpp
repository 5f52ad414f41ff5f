// make_ordered_rma(): notified operations over a network of single writes that keep no order, such
// as MPI windows.
//
// Keeps the order "data, flush, version, flush" of each operation, and the order of the versions of
// one slot. The first error of a write ends all operations. Has neither lock nor thread: one caller
// at a time.
#ifndef HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_
#define HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/transport/rma.hpp"

namespace hsgd {

// Writes of a network without order. Only flush() may block, and is called only when what it waits
// for is done already. All functions except close() throw Error if the network fails.
class HSGD_API UnorderedWrites {
 public:
  using Ticket = uint32_t;

  virtual ~UnorderedWrites() = default;
  // Reserves memory, so that the next writes do not run out of it when some of them are in flight.
  virtual void reserve(size_t tickets) = 0;
  // Starts a write of up to 2^30 bytes at `offset` of the target's segment; `data` must stay
  // unchanged until done().
  virtual Ticket put(int target, const void* data, size_t bytes, size_t offset) = 0;
  // Starts an atomic replacement of the 8 bytes at `offset`; `version` must stay unchanged
  // likewise.
  virtual Ticket replace(int target, const uint64_t* version, size_t offset) = 0;
  // Drives progress. Returns true once per ticket; this means only that the caller's memory is
  // free.
  virtual bool done(Ticket ticket) = 0;
  // Returns when everything put or replaced so far has reached the target's memory.
  virtual void flush(int target) = 0;
  // Makes what others wrote here visible to loads, and drives progress.
  virtual void sync() = 0;
  // See Rma::close().
  virtual bool close(const Deadline& deadline) noexcept = 0;
};

HSGD_API std::unique_ptr<Rma> make_ordered_rma(std::unique_ptr<UnorderedWrites> writes);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_
