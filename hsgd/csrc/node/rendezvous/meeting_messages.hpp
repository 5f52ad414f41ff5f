// MeetingHead, MeetingEntry: messages between the ranks of one node while they meet, and the
// descriptors sent with them. Sending never waits.
//
//   guest: knock             shows its half of the secret
//   host:  invitation        shows the other half, and sends the shared file; from here on both
//                             may send descriptors
//   guest: introduction      describes itself, with a descriptor of its process, once its part of
//                             the file is ready
//   host:  roster            some of the ranks with their descriptors, until all were sent
//   guest: received          confirms a roster: its descriptors are no longer in flight
//   either: failure          why it gives up; from a guest: its deadline has passed
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_MESSAGES_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_MESSAGES_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/os/shared_memory.hpp"
#include "hsgd_core.h"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/unix_socket.hpp"

namespace hsgd {

// The file that the ranks share, made by rank 0. Both functions may throw Error.
struct MeetingFile {
  std::function<Fd()> make;
  // Prepares this rank's part of the file; called on each rank before other ranks learn that it has
  // come.
  std::function<void(Fd file)> prepare;
};

// One rank of the node as the others see it.
struct Member {
  int32_t pid = 0;        // as the rank itself sees it
  int32_t name = 0;       // in errors
  uint64_t settings = 0;  // hash of what fixes the layout; must be equal on all ranks
  Fd process;             // pidfd; invalid if the kernel has none
  // Why this rank cannot take part; meet() then throws it on all ranks.
  hsgd_status failed = HSGD_OK;
  std::string failure;

  // Make the file, and this rank's part of it. If one of them fails, note the failure and return no
  // file.
  Fd make(const MeetingFile& file);
  void prepare(const MeetingFile& file, Fd descriptor);

 private:
  void note_failure(const Error& error);
};

enum class Say : int32_t {
  kKnock = 1,
  kInvitation = 2,
  kIntroduction = 3,
  kRoster = 4,
  kReceived = 5,
  kFailure = 6,
};

inline constexpr uint32_t kMagic = 0x64677368;  // "hsgd"
inline constexpr uint32_t kVersion = 10;        // of these messages, and of the shared layout
inline constexpr int kRosterEntries = kMostDescriptors;

struct MeetingHead {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  Say say = Say::kKnock;
  int32_t rank = 0;   // of the sender; in a roster the first one; in a failure the rank it is about
  int32_t size = 0;   // ranks of the node, as the sender knows it
  int32_t count = 0;  // number of entries that follow
  int32_t has_file = 0;  // 1: a descriptor of the shared file comes with it
  uint64_t settings = 0;
  int32_t failed = 0;  // hsgd_status; then `message` says why
  char proof[MeetingPoint::kProofBytes] = {};
  char message[512] = {};
};

// A rank; the descriptors are in the order of the entries.
struct MeetingEntry {
  int32_t pid;
  int32_t name;
  int32_t has_process;
};

struct MeetingMessage {
  MeetingHead head;
  MeetingEntry entries[kRosterEntries];
};

// Return a message of any kind except rosters.
MeetingHead words_of(Say say, int rank, int size);
MeetingHead failure_words(hsgd_status code, int rank, const std::string& message);

// Write the proof of the secret into a message, and check a proof.
void show_proof(const std::string& proof, MeetingHead* head);
bool is_proof(const MeetingHead& head, const std::string& proof);

// Sends a message. `file`: descriptor to send with it; -1: none.
Sent send_words(int socket, const MeetingHead& head, int file = -1);
// Sends `count` members, beginning with `first`, with their descriptors.
Sent send_members(int socket, MeetingHead head, const std::vector<Member>& members, int first,
                  int count);

// Returns false if the other side is gone. Throws if it is not a rank of this version. Adds the
// received members, which have the sender's settings, to `members`. `file`: receives a further
// descriptor, if one came.
bool receive_words(int socket, MeetingHead* head, std::vector<Member>* members, Fd* file = nullptr);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_MESSAGES_HPP_
