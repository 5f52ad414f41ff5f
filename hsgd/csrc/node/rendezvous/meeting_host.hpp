// Rank 0's side of a meeting: it lets ranks in, and tells each of all of them.
//
// Owns who has come, and how much is under way. Never trusts who has not shown the secret, where
// the path has one, and waits for nobody longer than the deadline.
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_

#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/meeting_messages.hpp"

namespace hsgd {

// Collective with join_meeting() of the ranks 1..size-1; see meet().
// `file`: what all share; invalid where it could not be made, which `self` says.
std::vector<Member> host_meeting(const std::string& path, Listener& listener,
                                 const std::vector<int>& world_ranks, Member self, const Fd& file,
                                 const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_
