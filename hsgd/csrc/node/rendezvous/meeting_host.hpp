// host_meeting(): rank 0's side of a meeting: lets ranks in, and sends each of them the list of
// all.
//
// Never trusts a process that has not shown the secret, if the path has one, and waits for no rank
// longer than the deadline.
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_

#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/meeting_messages.hpp"

namespace hsgd {

// Collective with join_meeting() on the ranks 1..size-1; see meet(). `file`: shared by all ranks;
// invalid if it could not be made, which `self` reports.
std::vector<Member> host_meeting(const std::string& path, Listener& listener,
                                 const std::vector<int>& names, Member self, const Fd& file,
                                 const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_HOST_HPP_
