// Listener: the socket at which the ranks of one node meet; MeetingPoint: its name and secret.
//
// A name alone proves nothing: any process on the node can read the abstract names in use, and take
// a free one. So names are drawn at random for each meeting if the ranks can share them in another
// way, and a secret that is never bound proves that a process got the path.
#ifndef HSGD_NODE_RENDEZVOUS_LISTENER_HPP_
#define HSGD_NODE_RENDEZVOUS_LISTENER_HPP_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os/shared_memory.hpp"
#include "hsgd_core.h"
#include "node/rendezvous/unix_socket.hpp"

namespace hsgd {

// A parsed path: "@NAME#SECRET", with a secret of 32 hexadecimal digits; otherwise all of it is the
// name.
struct MeetingPoint {
  static constexpr size_t kProofBytes = 16;
  std::string name;    // bound name; with '@' an abstract one, in the network namespace
  std::string secret;  // empty: the path has none
  // The guest shows one half of the secret, the host the other: no half follows from the other.
  std::string proof_of_guest() const { return secret.substr(0, kProofBytes); }
  std::string proof_of_host() const { return secret.empty() ? "" : secret.substr(kProofBytes); }
};
MeetingPoint meeting_point_of(const std::string& path);

// A name and a secret that cannot be guessed, in a form that fits in shared memory.
using MeetingWords = std::array<uint64_t, 4>;
HSGD_API MeetingWords draw_meeting_words();
HSGD_API std::string meeting_path(const MeetingWords& words);  // "@hsgd-NAME#SECRET"

// A listening socket that removes its path. A name that starts with '@' is not in the file system.
class HSGD_API Listener {
 public:
  // Throws HSGD_ERR_ARGUMENT if another process listens there.
  explicit Listener(const std::string& path);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int fd() const { return fd_.get(); }

 private:
  void publish(const std::string& hidden);

  std::string name_;
  Fd fd_;
  dev_t device_ = 0;  // of the socket's file
  ino_t inode_ = 0;
};

// The process that listens at a path. Never waits: a listener with a full queue counts as present.
struct Listening {
  enum class Who {
    kNobody,
    kTrusted,   // or not known, because its queue is full
    kStranger,  // another user's process: `peer`
    kUnknown,   // refuses connections, or sockets of this kind
  } who;
  Peer peer;
};
HSGD_API Listening who_listens(const std::string& path);

// Returns true if `path` can be reached from here, which proves that two ranks share a node.
HSGD_API bool reachable(const std::string& path);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_LISTENER_HPP_
