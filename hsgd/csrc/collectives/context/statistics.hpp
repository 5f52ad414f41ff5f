// Statistics: the counters of one communicator; only the thread that executes collectives writes
// them.
#ifndef HSGD_COLLECTIVES_CONTEXT_STATISTICS_HPP_
#define HSGD_COLLECTIVES_CONTEXT_STATISTICS_HPP_

#include <cstdint>

#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/transport/messages.hpp"

namespace hsgd {

struct Statistics {
  hsgd_counters counters{};  // without times and bytes between nodes
  uint64_t total_ticks = 0;
  uint64_t wait_ticks = 0;
  TickClock clock;

  hsgd_counters with(const WireCounters& wire) const {
    hsgd_counters all = counters;
    all.inter_bytes_sent = wire.bytes_sent;
    all.inter_bytes_received = wire.bytes_received;
    all.total_ns = clock.to_ns(total_ticks);
    all.wait_ns = clock.to_ns(wait_ticks);
    return all;
  }
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_STATISTICS_HPP_
