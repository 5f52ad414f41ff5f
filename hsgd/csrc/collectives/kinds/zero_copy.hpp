// Collectives on buffers that all ranks of a node can reach: no staging.
//
// Owns how ranks tell one another where their arguments lie, and the wait of each for all others,
// who touch its buffers until they are through. On one node the traffic is the least there is: each
// input is read once and each output written once.
#ifndef HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_
#define HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/context/context.hpp"

namespace hsgd {

// What is copied to several places, or in parts, is still in the nearest cache after the first.
inline constexpr size_t kCacheBlockBytes = 16 << 10;

// The arguments of all ranks of the node, by local rank, and what keeps them mapped.
struct SharedArguments {
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;  // empty where only inputs need to be in reach
  std::shared_ptr<SharedBuffer> in_buffer;
  std::shared_ptr<SharedBuffer> out_buffer;
};

// Opens the collective for a rank whose arguments lie in private memory.
void open_in_private(Context& context, const Operation& operation);

// Opens the collective when this rank's arguments lie in shared buffers: those of all ranks, if
// theirs lie in the same ones. `out_bytes`: 0 when only the inputs need to be in reach.
std::optional<SharedArguments> shared_arguments(Context& context, const Operation& operation,
                                                size_t in_bytes, size_t out_bytes);

// On one node, when all have entered: what this rank does by itself, and then the wait for all
// others to have done the same. Takes one step of the pipeline's counters.
void run_in_place(Context& context, const std::function<void()>& work);

// The other ranks of the node, beginning with another one on each, so that not all read from the
// same one; this rank comes last.
inline int in_turn(const Context& context, int i) {
  return (context.place().local_rank + 1 + i) % context.place().local_size;
}

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ZERO_COPY_HPP_
