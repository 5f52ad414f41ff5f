// Bringing the ranks of one node together over a UNIX socket: everybody gets everybody's
// descriptors.
//
// Owns the rendezvous only; the sockets are closed and the path is gone when it returns. Never maps
// memory.
#ifndef HSGD_BOOTSTRAP_HPP_
#define HSGD_BOOTSTRAP_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "hsgd_core.h"
#include "segment.hpp"
#include "wait.hpp"

namespace hsgd {

// One rank of the node as the others see it.
struct Member {
  int32_t pid = 0;  // as the rank itself sees it
  int32_t world_rank = 0;
  uint64_t settings = 0;  // must be equal on all ranks: a hash of what fixes the layout
  Fd segment;
  Fd process;  // see process_life.hpp
  hsgd_status failed =
      HSGD_OK;  // why this rank cannot take part; meet() then throws it on all ranks
  std::string failure;
};

// A listening socket that removes its path. A path that starts with '@' is an abstract name, which
// belongs to the network namespace and leaves nothing in the file system.
class HSGD_API Listener {
 public:
  explicit Listener(const std::string& path);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int fd() const { return fd_.get(); }

 private:
  std::string path_;
  Fd fd_;
};

// A path that starts with '@' and that nobody can guess.
HSGD_API std::string random_socket_name();

// Throws when this process has not the file descriptors that a node of `local_size` ranks takes,
// and some for the program: without them the ranks could not meet.
HSGD_API void check_descriptors(int local_size);

// True when `path` can be reached from here: the proof that two ranks share a node.
HSGD_API bool reachable(const std::string& path);

// Collective over the ranks 0..size-1 of the node. Rank 0 passes the listener when it has one
// already (else it is made here). Returns all members by local rank. Throws CollectiveTimeout,
// PeerLost or HSGD_ERR_ARGUMENT (wrong size, rank taken twice, other settings, other version), with
// the ranks in the text, and what the deadline's watch throws.
std::vector<Member> meet(const std::string& path, Listener* listener, int rank, int size,
                         Member self, const Deadline& deadline);

}  // namespace hsgd

#endif  // HSGD_BOOTSTRAP_HPP_
