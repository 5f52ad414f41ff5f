// The C interface over NotifiedExchange: checks arguments, turns exceptions into status codes.
#include "capi/notify_api.hpp"

#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/status.hpp"
#include "onesided/tcp_rma.hpp"

namespace hsgd {
namespace {

void check(const hsgd_exchange_options& options) {
  constexpr uint64_t kMostSegment = uint64_t{1} << 48;  // what processors can address
  constexpr uint64_t kMostSlots = 1 << 20;
  constexpr uint32_t kMostQueue = 1 << 16;
  constexpr uint64_t kLeastSlice = 4 << 10;
  constexpr uint64_t kMostSlice = 64 << 20;
  if (options.struct_bytes != sizeof(hsgd_exchange_options)) {
    throw Error(
        HSGD_ERR_ARGUMENT, -1,
        "hsgd_exchange_options has another size; caller and libhsgd_core differ in version");
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
NotifiedExchange::MakeRma over_sockets(Communicator& communicator, SocketSettings settings,
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
    const hsgd_label label = {"exchange addresses", nullptr, 0};
    communicator.allgather(&listener.place(), places.data(), counts.data(), HSGD_UINT8, &label);
    return make_socket_rma(std::move(listener), std::move(places), place.rank, base, bytes,
                           settings);
  };
}

}  // namespace

hsgd_exchange* new_exchange(hsgd_comm* comm, const hsgd_exchange_options& options,
                            const NotifiedExchange::MakeRma& make) {
  check(options);
  comm->submissions->keep_order();
  const NotifiedExchange::Settings settings{
      options.segment_bytes,    options.slots,         options.queue, options.timeout_s,
      options.remote_only != 0, options.forgiving != 0};
  return new hsgd_exchange{{*comm->communicator, settings, make}};
}

}  // namespace hsgd

using hsgd::guarded;

int hsgd_exchange_create(hsgd_comm* comm, const hsgd_exchange_options* options,
                         hsgd_exchange** exchange, hsgd_error* err) {
  return guarded(err, [&] {
    *exchange = nullptr;
    const bool far = comm->communicator->topology().node_count > 1 || options->remote_only != 0;
    if (far && options->network == HSGD_NETWORK_SOCKETS) {
      hsgd::SocketSettings settings{options->forgiving != 0, options->slice_bytes};
      settings.timeout_s = options->timeout_s;
      *exchange = hsgd::new_exchange(
          comm, *options,
          hsgd::over_sockets(*comm->communicator, settings, options->remote_only != 0));
      return;
    }
    if (far) {
      throw hsgd::Error(
          HSGD_ERR_ARGUMENT, -1,
          "NotifiedWindow: writes between nodes go over MPI; use hsgd_mpi_exchange_create");
    }
    *exchange = hsgd::new_exchange(comm, *options, nullptr);
  });
}

void hsgd_exchange_end_work(hsgd_exchange* exchange) { exchange->exchange.end_work(); }

void hsgd_exchange_abandon(hsgd_exchange* exchange) { exchange->exchange.abandon(); }

int hsgd_exchange_descriptor(const hsgd_exchange* exchange) {
  return exchange->exchange.descriptor();
}

void hsgd_exchange_destroy(hsgd_exchange* exchange) {
  if (exchange != nullptr && exchange->exchange.is_mine()) delete exchange;
}

int hsgd_exchange_put_notify(hsgd_exchange* exchange, const hsgd_piece* pieces, uint64_t count,
                             int target, uint32_t slot, uint64_t version, double timeout_s,
                             uint32_t order, uint64_t* ticket, hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::Piece> list;
    list.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      list.push_back({pieces[i].data, pieces[i].bytes, pieces[i].offset});
    }
    *ticket = exchange->exchange.put_notify(list, target, slot, version, timeout_s, order);
  });
}

int hsgd_exchange_done(hsgd_exchange* exchange, uint64_t ticket, int* done, hsgd_error* err) {
  return guarded(err, [&] { *done = exchange->exchange.done(ticket) ? 1 : 0; });
}

int hsgd_exchange_drain(hsgd_exchange* exchange, double timeout_s, hsgd_error* err) {
  return guarded(err, [&] { exchange->exchange.drain(timeout_s); });
}

int hsgd_exchange_wait_any(hsgd_exchange* exchange, const uint32_t* slots, const uint64_t* seen,
                           uint64_t count, double timeout_s, uint32_t* slot, uint64_t* version,
                           hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::NotifiedExchange::Seen> list;
    list.reserve(count);
    for (uint64_t i = 0; i < count; ++i) list.push_back({slots[i], seen[i]});
    const auto found = exchange->exchange.wait_any(list, timeout_s);
    *slot = found.slot;
    *version = found.version;
  });
}

int hsgd_exchange_test(hsgd_exchange* exchange, uint32_t slot, uint64_t* version, hsgd_error* err) {
  return guarded(err, [&] { *version = exchange->exchange.test(slot); });
}

int hsgd_exchange_reset(hsgd_exchange* exchange, uint32_t slot, uint64_t* version,
                        hsgd_error* err) {
  return guarded(err, [&] { *version = exchange->exchange.reset(slot); });
}

int hsgd_exchange_bind(hsgd_exchange* exchange, uint32_t slot, int source, hsgd_error* err) {
  return guarded(err, [&] { exchange->exchange.bind(slot, source); });
}

int hsgd_exchange_segment(hsgd_exchange* exchange, int rank, void** data, hsgd_buffer** memory,
                          hsgd_error* err) {
  return guarded(err, [&] {
    *data = exchange->exchange.segment(rank);
    *memory = *data == nullptr ? nullptr : new hsgd_buffer{exchange->exchange.memory()};
  });
}
