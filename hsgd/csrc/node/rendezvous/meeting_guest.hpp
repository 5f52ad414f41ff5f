// join_meeting(): the side of all ranks except rank 0 in a meeting.
//
// Never sends a descriptor before it knows that the other side belongs to the same user, and has
// the secret if the path has one.
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_

#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/meeting_messages.hpp"

namespace hsgd {

// Collective with host_meeting() on rank 0; see meet().
std::vector<Member> join_meeting(const std::string& path, int rank, const std::vector<int>& names,
                                 Member self, const MeetingFile& file, const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_GUEST_HPP_
