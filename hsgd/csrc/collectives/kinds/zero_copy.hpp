// run_in_place(): runs collectives without staging, on buffers that all ranks of a node can reach.
//
// Ranks exchange the positions of their arguments. Each waits until all others have finished with
// its buffers. On one node this is the least traffic possible: each input is read once and each
// output written once.
#ifndef HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_
#define HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/context/context.hpp"

namespace hsgd {

// The block size of repeated copies: after the first one a block is still in the nearest cache.
inline constexpr size_t kCacheBlockBytes = 16 << 10;

// The arguments of all ranks of the node, by local rank, and the references that keep them mapped.
struct SharedArguments {
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;  // empty if only inputs must be in reach
  std::shared_ptr<SharedBuffer> in_buffer;
  std::shared_ptr<SharedBuffer> out_buffer;
};

// Publishes the signature of this rank's call without places in shared buffers, if its arguments
// lie in private memory.
void open_in_private(Context& context, const Operation& operation);

// Opens the collective if this rank's arguments lie in shared buffers. Returns the arguments of all
// ranks if they lie in the same buffers. `out_bytes`: 0 if only the inputs must be in reach.
std::optional<SharedArguments> shared_arguments(Context& context, const Operation& operation,
                                                size_t in_bytes, size_t out_bytes);

// Runs this rank's work on one node after all ranks have entered, then waits for the work of all
// others. Takes one step of the pipeline's counters.
void run_in_place(Context& context, const std::function<void()>& work);

// Returns the i-th rank of the node in an order that begins differently on each rank, so that not
// all read from the same one; this rank comes last.
inline int in_turn(const Context& context, int i) {
  return (context.place().local_rank + 1 + i) % context.place().local_size;
}

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_
