// Where the ranks of one node meet: the name of a socket, the secret that goes with it, and who
// listens there.
//
// Owns the listening socket and its path. A name alone proves nothing: anybody on the node can read
// the abstract names in use, and take one that is free. So names are drawn at random for each
// meeting where the ranks have another way to tell one another, and a secret that is never bound
// proves that a process was told.
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

// What a path says: "@NAME#SECRET", with a secret of 32 hexadecimal digits, or all of it the name.
struct MeetingPoint {
  static constexpr size_t kProofBytes = 16;
  std::string name;    // that is bound; with '@' an abstract one, of the network namespace
  std::string secret;  // empty: the path has none
  // Who knocks shows one half, who opens the other: neither can be had from the other side's.
  std::string proof_of_guest() const { return secret.substr(0, kProofBytes); }
  std::string proof_of_host() const { return secret.empty() ? "" : secret.substr(kProofBytes); }
};
MeetingPoint meeting_point_of(const std::string& path);

// A name and a secret that nobody can guess, in a form that fits in shared memory.
using MeetingWords = std::array<uint64_t, 4>;
HSGD_API MeetingWords draw_meeting_words();
HSGD_API std::string meeting_path(const MeetingWords& words);  // "@hsgd-NAME#SECRET"

// A listening socket that removes its path. One that starts with '@' leaves nothing in the file
// system.
class HSGD_API Listener {
 public:
  // Throws HSGD_ERR_ARGUMENT when another process listens there.
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

// Who listens at a path. Never waits: a listener whose queue is full is there.
struct Listening {
  enum class Who {
    kNobody,
    kTrusted,   // or nobody can say, because its queue is full
    kStranger,  // `peer`
    kUnknown,   // lets this process not connect, or not with a socket of this kind
  } who;
  Peer peer;
};
HSGD_API Listening who_listens(const std::string& path);

// True when `path` can be reached from here: the proof that two ranks share a node.
HSGD_API bool reachable(const std::string& path);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_LISTENER_HPP_
