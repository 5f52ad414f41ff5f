// run_in_place(): finds the arguments of all ranks and waits for their users.
#include "collectives/kinds/zero_copy.hpp"

#include <cstring>

#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

// Opens a large collective with the positions of its arguments in the header. Shared buffers are
// used in place if all ranks of the node have the same ones.
void open_large(Context& context, const Operation& operation, const ArenaPlace places[2]) {
  constexpr size_t kPlacesBytes = 2 * sizeof(ArenaPlace);
  static_assert(kPlacesBytes <= CellHeader::kInlineBytes, "costs no further line");
  context.open(operation, places, kPlacesBytes);
}

ArenaPlace place_of(const SharedBuffer& buffer, const void* data) {
  return {buffer.id(), static_cast<uint64_t>(static_cast<const std::byte*>(data) - buffer.own())};
}

}  // namespace

void open_in_private(Context& context, const Operation& operation) {
  constexpr ArenaPlace kPrivate[2] = {};
  open_large(context, operation, kPrivate);
}

std::optional<SharedArguments> shared_arguments(Context& context, const Operation& operation,
                                                size_t in_bytes, size_t out_bytes) {
  if (context.arena().empty()) return std::nullopt;
  SharedArguments all;
  all.in_buffer = context.arena().find(operation.in, in_bytes);
  if (all.in_buffer == nullptr) return std::nullopt;
  ArenaPlace places[2] = {place_of(*all.in_buffer, operation.in), {}};
  if (out_bytes > 0) {
    all.out_buffer = context.arena().find(operation.out, out_bytes);
    if (all.out_buffer == nullptr) return std::nullopt;
    places[1] = place_of(*all.out_buffer, operation.out);
  }
  open_large(context, operation, places);
  // Agreement on this node is enough. Other nodes, and other ranks of this one, may have private
  // buffers, whose first step goes with the headers; this one does the same.
  const FirstStepFn later = [] { return std::optional<RoundPayload*>(); };
  context.wait_until([&] { return context.permission(later) != Permission::kUnknown; });
  for (int rank = 0; rank < context.place().local_size; ++rank) {
    ArenaPlace theirs[2];
    std::memcpy(theirs, context.local().payload(rank, context.sequence(), sizeof theirs),
                sizeof theirs);
    if (theirs[0].buffer != places[0].buffer || theirs[1].buffer != places[1].buffer)
      return std::nullopt;
    all.in.push_back(all.in_buffer->data(rank) + theirs[0].offset);
    if (out_bytes > 0) all.out.push_back(all.out_buffer->data(rank) + theirs[1].offset);
  }
  return all;
}

// Waits after the work: others read this rank's input and may write its output until they finish.
void run_in_place(Context& context, const std::function<void()>& work) {
  at_level(context.record(), &hsgd_record::reduce, [&] {
    work();
    return true;
  });
  HSGD_FAULT_POINT("in place: done, not told");
  context.local().publish(&Progress::gathered, context.base() + 1);
  HSGD_FAULT_POINT("in place: done");
  context.wait_until(
      [&] { return context.local().peers_reached(&Progress::gathered, context.base() + 1); });
  context.finish_steps(1);
}

}  // namespace hsgd
