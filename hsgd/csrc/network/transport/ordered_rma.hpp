// Notified operations over a network of single writes that keep no order, as MPI's windows.
//
// Owns the order "data, flush, version, flush" of each operation, and that of the versions of one
// slot. The first error of a write ends all. Has neither lock nor thread: one caller at a time.
#ifndef HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_
#define HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/transport/rma.hpp"

namespace hsgd {

// Only flush() may block, and is called when what it waits for is done already. All but close()
// throw Error where the network fails.
class HSGD_API UnorderedWrites {
 public:
  using Ticket = uint32_t;

  virtual ~UnorderedWrites() = default;
  // So that the next writes do not fail for lack of memory when some of them are on their way.
  virtual void reserve(size_t tickets) = 0;
  // Starts a write of up to 2^30 bytes at `offset` of the target's segment; `data` stays as it is
  // until done().
  virtual Ticket put(int target, const void* data, size_t bytes, size_t offset) = 0;
  // Starts the atomic replacement of the 8 bytes at `offset`; `version` as above.
  virtual Ticket replace(int target, const uint64_t* version, size_t offset) = 0;
  // Drives progress. Says true once per ticket: the caller's memory is free then, no more.
  virtual bool done(Ticket ticket) = 0;
  // Everything put or replaced so far has reached the target's memory.
  virtual void flush(int target) = 0;
  // Makes what others wrote here visible to loads, and drives progress.
  virtual void sync() = 0;
  // As Rma::close().
  virtual bool close(const Deadline& deadline) noexcept = 0;
};

HSGD_API std::unique_ptr<Rma> make_ordered_rma(std::unique_ptr<UnorderedWrites> writes);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TRANSPORT_ORDERED_RMA_HPP_
