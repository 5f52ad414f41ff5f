// meet(): connects the ranks of one node over a UNIX socket. Each rank gets a descriptor of every
// rank's process, and one of a file that all share.
//
// The sockets are closed and the path is gone when it returns. Never maps memory, never has more
// than a few hundred descriptors in flight between processes, and neither sends anything to
// processes of other users nor reads what they send.
#ifndef HSGD_NODE_RENDEZVOUS_BOOTSTRAP_HPP_
#define HSGD_NODE_RENDEZVOUS_BOOTSTRAP_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/meeting_messages.hpp"

namespace hsgd {

// Throws if this process has fewer than `wanted` free file descriptors, and some for the program:
// without them the ranks could not meet. A node needs kDescriptorsPerRank for each of its ranks.
constexpr size_t kDescriptorsPerRank = 2;
HSGD_API void check_descriptors(size_t wanted);

// Collective over the ranks of the node, which all got `path` (see MeetingPoint) in some other way.
// `names`: their names in errors, by local rank; `rank`: the local one. Rank 0 passes its
// listener, or nullptr: then one is made here. Returns all members by local rank. Throws
// CollectiveTimeout, PeerLost or HSGD_ERR_ARGUMENT (wrong size, rank used twice, other settings,
// other version, another user listens there), with the ranks in the text; also what the deadline's
// watch throws, and what `file` throws on any rank.
std::vector<Member> meet(const std::string& path, Listener* listener, int rank,
                         const std::vector<int>& names, Member self, const MeetingFile& file,
                         const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_BOOTSTRAP_HPP_
