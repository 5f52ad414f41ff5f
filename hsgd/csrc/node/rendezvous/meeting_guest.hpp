// The side of all ranks but 0 of a meeting.
//
// Owns the connection to rank 0. Never sends a descriptor before the other side is known to be of
// the same user, and to have the secret where the path has one.
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_

#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/meeting_messages.hpp"

namespace hsgd {

// Collective with host_meeting() of rank 0; see meet().
std::vector<Member> join_meeting(const std::string& path, int rank,
                                 const std::vector<int>& world_ranks, Member self,
                                 const MeetingFile& file, const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_
