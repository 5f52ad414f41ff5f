// Order and partners of the messages of a round. Never blocks.
#ifndef HSGD_NETWORK_ROUNDS_ROUND_MESSAGES_HPP_
#define HSGD_NETWORK_ROUNDS_ROUND_MESSAGES_HPP_

#include <cstddef>

#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"

namespace hsgd {

// Calls receive(member) and then send(member) for the other cores of the group in a round. Each
// core begins with a different member.
template <class Receive, class Send>
void for_each_member(const RoundSchedule& rounds, int round, int core, Receive&& receive,
                     Send&& send) {
  const int radix = rounds.radix(round);
  const int own = rounds.index(round, core);
  for (int i = 1; i < radix; ++i) {
    receive(rounds.member(round, core, (own + radix - i) % radix));
  }
  for (int i = 1; i < radix; ++i) send(rounds.member(round, core, (own + i) % radix));
}

// Sends what this core has of `data` to the cores of its group, and receives what they have, after
// earlier rounds of this kind, which go from the last round of the schedule to the first.
// `offset_of(leaf)`: offset of a leaf.
template <class OffsetOf>
void spread(const RoundSchedule& rounds, int round, int core, std::byte* data, OffsetOf&& offset_of,
            Messages* messages, WireCounters& counters) {
  const auto bytes_of = [&](const RoundSchedule::Leaves& leaves) {
    return offset_of(leaves.end) - offset_of(leaves.begin);
  };
  const RoundSchedule::Leaves own = rounds.leaves(round + 1, core);
  for_each_member(
      rounds, round, core,
      [&](int member) {
        const RoundSchedule::Leaves its_leaves = rounds.leaves(round + 1, member);
        messages->receive(rounds.node_of(member), Channel::kGather,
                          data + offset_of(its_leaves.begin), bytes_of(its_leaves), counters);
      },
      [&](int member) {
        messages->send(rounds.node_of(member), Channel::kGather, data + offset_of(own.begin),
                       bytes_of(own), counters);
      });
}

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_ROUND_MESSAGES_HPP_
