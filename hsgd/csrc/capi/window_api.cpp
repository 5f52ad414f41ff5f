// The C interface over NotifiedWindow: checks arguments, turns exceptions into status codes.
#include "capi/window_api.hpp"

#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/status.hpp"
#include "onesided/tcp_rma.hpp"

namespace hsgd {
namespace {

void check(const hsgd_window_options& options) {
  constexpr uint64_t kMostSegment = uint64_t{1} << 48;  // what processors can address
  constexpr uint64_t kMostSlots = 1 << 20;
  constexpr uint32_t kMostQueue = 1 << 16;
  constexpr uint64_t kLeastSlice = 4 << 10;
  constexpr uint64_t kMostSlice = 64 << 20;
  if (options.struct_bytes != sizeof(hsgd_window_options)) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "hsgd_window_options has another size; caller and libhsgd_core differ in version");
  }
  if (options.segment_bytes > kMostSegment) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("NotifiedWindow: segment_bytes is %llu; give %llu or less",
                     static_cast<unsigned long long>(options.segment_bytes),
                     static_cast<unsigned long long>(kMostSegment)));
  }
  if (options.slots < 1 || options.slots > kMostSlots) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("NotifiedWindow: slots is %u; give 1 to 1048576", options.slots));
  }
  if (options.slice_bytes < kLeastSlice || options.slice_bytes > kMostSlice) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("NotifiedWindow: slice_bytes is %llu; give %llu to %llu",
                     static_cast<unsigned long long>(options.slice_bytes),
                     static_cast<unsigned long long>(kLeastSlice),
                     static_cast<unsigned long long>(kMostSlice)));
  }
  if (options.queue < 1 || options.queue > kMostQueue) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("NotifiedWindow: queue is %u; give 1 to 65536", options.queue));
  }
  if (!(options.timeout_s > 0 && options.timeout_s <= 1e9)) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("NotifiedWindow: timeout_s is %g; give seconds above 0, up to 1e9",
                     options.timeout_s));
  }
}

// Collective when it is called: all ranks tell all where they are. `remote_only`: ranks of one node
// connect to one another, too.
NotifiedWindow::MakeRma over_sockets(Communicator& communicator, SocketSettings settings,
                                     bool remote_only) {
  const hsgd_topology own = communicator.topology();
  for (int rank = 0; rank < own.size; ++rank) {
    const bool is_near = communicator.local_rank_of(rank) >= 0;
    settings.connect.push_back(remote_only ? rank != own.rank : !is_near);
  }
  return [&communicator, settings](void* base, size_t bytes) {
    const hsgd_topology place = communicator.topology();
    SocketListener listener;
    std::vector<SocketPlace> places(static_cast<size_t>(place.size));
    const std::vector<uint64_t> counts(places.size(), sizeof(SocketPlace));
    const hsgd_label label = {"window addresses", nullptr, 0};
    communicator.allgather(&listener.place(), places.data(), counts.data(), HSGD_UINT8, &label);
    return make_socket_rma(std::move(listener), std::move(places), place.rank, base, bytes,
                           settings);
  };
}

}  // namespace

hsgd_window* new_window(hsgd_comm* comm, const hsgd_window_options& options,
                        const NotifiedWindow::MakeRma& make) {
  check(options);
  comm->submissions->keep_order();
  const NotifiedWindow::Settings settings{
      options.segment_bytes,    options.slots,         options.queue, options.timeout_s,
      options.remote_only != 0, options.forgiving != 0};
  return new hsgd_window{{*comm->communicator, settings, make}};
}

}  // namespace hsgd

using hsgd::guarded;

int hsgd_window_create(hsgd_comm* comm, const hsgd_window_options* options, hsgd_window** window,
                       hsgd_error* err) {
  return guarded(err, [&] {
    *window = nullptr;
    const bool far = comm->communicator->topology().node_count > 1 || options->remote_only != 0;
    if (far && options->network == HSGD_NETWORK_SOCKETS) {
      hsgd::SocketSettings settings{options->forgiving != 0, options->slice_bytes};
      settings.timeout_s = options->timeout_s;
      *window = hsgd::new_window(
          comm, *options,
          hsgd::over_sockets(*comm->communicator, settings, options->remote_only != 0));
      return;
    }
    if (far) {
      throw hsgd::Error(
          HSGD_ERR_ARGUMENT, -1,
          "NotifiedWindow: writes between nodes go over MPI; use hsgd_mpi_window_create");
    }
    *window = hsgd::new_window(comm, *options, nullptr);
  });
}

void hsgd_window_end_work(hsgd_window* window) { window->window.end_work(); }

void hsgd_window_abandon(hsgd_window* window) { window->window.abandon(); }

int hsgd_window_descriptor(const hsgd_window* window) { return window->window.descriptor(); }

void hsgd_window_destroy(hsgd_window* window) {
  if (window != nullptr && window->window.is_mine()) delete window;
}

int hsgd_window_put_notify(hsgd_window* window, const hsgd_piece* pieces, uint64_t count,
                           int target, uint32_t slot, uint64_t version, double timeout_s,
                           uint32_t order, uint64_t* ticket, hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::Piece> list;
    list.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      list.push_back({pieces[i].data, pieces[i].bytes, pieces[i].offset});
    }
    *ticket = window->window.put_notify(list, target, slot, version, timeout_s, order);
  });
}

int hsgd_window_done(hsgd_window* window, uint64_t ticket, int* done, hsgd_error* err) {
  return guarded(err, [&] { *done = window->window.done(ticket) ? 1 : 0; });
}

int hsgd_window_drain(hsgd_window* window, double timeout_s, hsgd_error* err) {
  return guarded(err, [&] { window->window.drain(timeout_s); });
}

int hsgd_window_wait_any(hsgd_window* window, const uint32_t* slots, const uint64_t* seen,
                         uint64_t count, double timeout_s, uint32_t* slot, uint64_t* version,
                         hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::NotifiedWindow::Seen> list;
    list.reserve(count);
    for (uint64_t i = 0; i < count; ++i) list.push_back({slots[i], seen[i]});
    const auto found = window->window.wait_any(list, timeout_s);
    *slot = found.slot;
    *version = found.version;
  });
}

int hsgd_window_test(hsgd_window* window, uint32_t slot, uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] { *version = window->window.test(slot); });
}

int hsgd_window_reset(hsgd_window* window, uint32_t slot, uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] { *version = window->window.reset(slot); });
}

int hsgd_window_bind(hsgd_window* window, uint32_t slot, int source, hsgd_error* err) {
  return guarded(err, [&] { window->window.bind(slot, source); });
}

int hsgd_window_segment(hsgd_window* window, int rank, void** data, hsgd_buffer** memory,
                        hsgd_error* err) {
  return guarded(err, [&] {
    *data = window->window.segment(rank);
    *memory = *data == nullptr ? nullptr : new hsgd_buffer{window->window.memory()};
  });
}
