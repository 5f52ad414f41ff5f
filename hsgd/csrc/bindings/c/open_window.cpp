// open_window(): checks bounds, exchanges addresses and chooses a network.
#include "bindings/c/open_window.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "network/tcp_window/rma.hpp"

namespace hsgd {
namespace {

// Returns a function that connects over sockets; that function is collective: all ranks exchange
// their addresses. With `remote_only` ranks of one node connect to one another, too.
NotifiedWindow::MakeRma over_sockets(Communicator& communicator, SocketSettings settings,
                                     const WindowOptions& options) {
  const bool remote_only = options.settings.remote_only;
  const hsgd_topology own = communicator.topology();
  for (int rank = 0; rank < own.size; ++rank) {
    const bool is_near = communicator.local_rank_of(rank) >= 0;
    settings.connect.push_back(remote_only ? rank != own.rank : !is_near);
  }
  return [&communicator, settings, &options](void* base, size_t bytes) {
    const hsgd_topology place = communicator.topology();
    std::optional<SocketListener> listener;
    std::optional<Error> failure;
    try {
      listener.emplace(options.interfaces);
    } catch (const Error& error) {  // thrown later, because the others wait for this rank
      failure = error;
    }
    const SocketPlace own = listener ? listener->place() : SocketPlace{};
    std::vector<SocketPlace> places(static_cast<size_t>(place.size));
    const std::vector<uint64_t> counts(places.size(), sizeof(SocketPlace));
    const hsgd_label label = {"window addresses", nullptr, 0};
    communicator.allgather(&own, places.data(), counts.data(), HSGD_UINT8, &label);
    if (failure) throw Error(*failure);
    for (size_t rank = 0; rank < places.size(); ++rank) {
      if (places[rank].port != 0) continue;
      const int name = communicator.place().names.of(static_cast<int>(rank));
      throw_error(HSGD_ERR_SYSTEM, name,
                  "NotifiedWindow: rank %d cannot be reached over TCP; its own error says why",
                  name);
    }
    return make_socket_rma(std::move(*listener), std::move(places), place.rank, base, bytes,
                           settings);
  };
}

}  // namespace

void check_options(const WindowOptions& options) {
  constexpr uint64_t kMostSegment = uint64_t{1} << 48;  // what processors can address
  constexpr uint64_t kMostSlots = 1 << 20;
  constexpr uint32_t kMostQueue = 1 << 16;
  constexpr uint64_t kLeastSlice = 4 << 10;
  constexpr uint64_t kMostSlice = 64 << 20;
  const NotifiedWindow::Settings& settings = options.settings;
  if (settings.segment_bytes > kMostSegment) {
    throw_invalid("NotifiedWindow: segment_bytes is %llu; give %llu or less",
                  static_cast<unsigned long long>(settings.segment_bytes),
                  static_cast<unsigned long long>(kMostSegment));
  }
  if (settings.slots < 1 || settings.slots > kMostSlots) {
    throw_invalid("NotifiedWindow: slots is %u; give 1 to 1048576", settings.slots);
  }
  if (options.slice_bytes < kLeastSlice || options.slice_bytes > kMostSlice) {
    throw_invalid("NotifiedWindow: slice_bytes is %llu; give %llu to %llu",
                  static_cast<unsigned long long>(options.slice_bytes),
                  static_cast<unsigned long long>(kLeastSlice),
                  static_cast<unsigned long long>(kMostSlice));
  }
  if (settings.queue < 1 || settings.queue > kMostQueue) {
    throw_invalid("NotifiedWindow: queue is %u; give 1 to 65536", settings.queue);
  }
  if (!(settings.timeout_s > 0 && settings.timeout_s <= 1e9)) {
    throw_invalid("NotifiedWindow: timeout_s is %g; give seconds above 0, up to 1e9",
                  settings.timeout_s);
  }
}

std::unique_ptr<NotifiedWindow> open_window(Communicator& communicator,
                                            const WindowOptions& options,
                                            const NotifiedWindow::MakeRma& over_mpi) {
  const NotifiedWindow::Settings& settings = options.settings;
  const bool far = communicator.topology().node_count > 1 || settings.remote_only;
  NotifiedWindow::MakeRma make;
  if (far && options.sockets) {
    SocketSettings sockets{settings.forgiving, options.slice_bytes};
    sockets.timeout_s = settings.timeout_s;
    sockets.names = communicator.place().names;
    make = over_sockets(communicator, std::move(sockets), options);
  } else if (far) {
    if (over_mpi == nullptr) {
      throw_invalid(
          "NotifiedWindow: ranks of other nodes are reached over MPI, but this "
          "communicator was not made over MPI");
    }
    make = over_mpi;
  }
  return std::make_unique<NotifiedWindow>(communicator, settings, make);
}

}  // namespace hsgd
