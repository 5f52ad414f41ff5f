// What the ranks of one node say to one another while they meet, and the descriptors that go along.
//
// Owns the form of the messages. Never decides who says what to whom, and never waits.
//
//   guest: knock             shows its half of the secret
//   host:  invitation        shows the other half, and gives the file that all share; from here on
//                            both may send descriptors
//   guest: introduction      itself, with a descriptor of its process, once its part of the file is
//                            ready
//   host:  roster            some of the ranks with theirs, until all were told
//   guest: received          of each roster: its descriptors are under way no more
//   either: failure          why it gives up; of a guest that its deadline has passed
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

// The file that the ranks share, made by rank 0. Either function may throw Error.
struct MeetingFile {
  std::function<Fd()> make;
  // On each rank, before any other hears that it has come: makes its part of the file ready.
  std::function<void(Fd file)> prepare;
};

// One rank of the node as the others see it.
struct Member {
  int32_t pid = 0;  // as the rank itself sees it
  int32_t world_rank = 0;
  uint64_t settings = 0;  // must be equal on all ranks: a hash of what fixes the layout
  Fd process;             // pidfd; invalid where the kernel has none
  // Why this rank cannot take part; meet() then throws it on all ranks.
  hsgd_status failed = HSGD_OK;
  std::string failure;

  // Makes the file and this rank's part of it; notes the failure and returns none where one fails.
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
inline constexpr uint32_t kVersion = 9;         // of these messages, and of what ranks then share
inline constexpr int kRosterEntries = kMostDescriptors;

struct MeetingHead {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  Say say = Say::kKnock;
  int32_t rank = 0;   // the speaker's; of a roster the first one's; of a failure whom it is about
  int32_t size = 0;   // of the node, as the speaker has it
  int32_t count = 0;  // entries that follow
  int32_t has_file = 0;  // whether a descriptor of the shared file goes along
  uint64_t settings = 0;
  int32_t failed = 0;  // hsgd_status; then `message` says why
  char proof[MeetingPoint::kProofBytes] = {};
  char message[512] = {};
};

// A rank; the descriptors are in the order of the entries.
struct MeetingEntry {
  int32_t pid;
  int32_t world_rank;
  int32_t has_process;
};

struct MeetingMessage {
  MeetingHead head;
  MeetingEntry entries[kRosterEntries];
};

// Of any kind but rosters.
MeetingHead words_of(Say say, int rank, int size);
MeetingHead failure_words(hsgd_status code, int rank, const std::string& message);

// Write the proof of the secret into a message, and check one.
void show_proof(const std::string& proof, MeetingHead* head);
bool is_proof(const MeetingHead& head, const std::string& proof);

// `file`: descriptor that goes along; -1: none.
Sent send_words(int socket, const MeetingHead& head, int file = -1);
// `count` of the members from `first` on, with their descriptors.
Sent send_members(int socket, MeetingHead head, const std::vector<Member>& members, int first,
                  int count);

// False when the other side is gone. Throws when it is no rank of this version. The members that
// were told are added to `members`, whose settings are the speaker's. `file`: what came along
// beside them, if anything.
bool receive_words(int socket, MeetingHead* head, std::vector<Member>* members, Fd* file = nullptr);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_MESSAGES_HPP_
