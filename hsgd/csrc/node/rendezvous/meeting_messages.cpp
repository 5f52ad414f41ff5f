// Packs ranks into messages and unpacks them.
#include "node/rendezvous/meeting_messages.hpp"

#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

size_t bytes_of(int count) {
  return offsetof(MeetingMessage, entries) + static_cast<size_t>(count) * sizeof(MeetingEntry);
}

void take_members(const MeetingMessage& message, std::vector<Fd> descriptors,
                  std::vector<Member>* members, Fd* file) {
  auto next = descriptors.begin();
  const auto take = [&](bool sent) {
    if (!sent) return Fd();
    if (next == descriptors.end()) {
      throw_error(HSGD_ERR_SYSTEM, -1,
                  "set-up: a message arrived without its file descriptors; a security module of "
                  "the system may forbid passing them");
    }
    return std::move(*next++);
  };
  for (int i = 0; i < message.head.count; ++i) {
    const MeetingEntry& entry = message.entries[i];
    Member member;
    member.pid = entry.pid;
    member.name = entry.name;
    member.settings = message.head.settings;
    member.process = take(entry.has_process != 0);
    members->push_back(std::move(member));
  }
  Fd beside = take(message.head.has_file != 0);
  if (file != nullptr) *file = std::move(beside);
}

}  // namespace

Fd Member::make(const MeetingFile& file) {
  Fd made;
  try {
    made = file.make();
    file.prepare(Fd::duplicate(made.get()));
  } catch (const Error& error) {
    note_failure(error);
  }
  return made;
}

void Member::prepare(const MeetingFile& file, Fd descriptor) {
  try {
    file.prepare(std::move(descriptor));
  } catch (const Error& error) {
    note_failure(error);
  }
}

void Member::note_failure(const Error& error) {
  failed = error.code();
  failure = text("rank %d: %s", name, error.what());
}

MeetingHead words_of(Say say, int rank, int size) {
  MeetingHead head;
  head.say = say;
  head.rank = rank;
  head.size = size;
  return head;
}

MeetingHead failure_words(hsgd_status code, int rank, const std::string& message) {
  MeetingHead head = words_of(Say::kFailure, rank, 0);
  head.failed = code;
  std::strncpy(head.message, message.c_str(), sizeof head.message - 1);
  return head;
}

void show_proof(const std::string& proof, MeetingHead* head) {
  proof.copy(head->proof, sizeof head->proof);
}

bool is_proof(const MeetingHead& head, const std::string& proof) {
  return is_same_secret(head.proof, proof.data(), proof.size());
}

Sent send_words(int socket, const MeetingHead& head, int file) {
  MeetingHead words = head;
  words.has_file = file >= 0 ? 1 : 0;
  return send_message(socket, &words, bytes_of(0),
                      file >= 0 ? std::vector<int>{file} : std::vector<int>{});
}

Sent send_members(int socket, MeetingHead head, const std::vector<Member>& members, int first,
                  int count) {
  MeetingMessage message{};
  std::vector<int> descriptors;
  head.count = count;
  message.head = head;
  for (int i = 0; i < count; ++i) {
    const Member& member = members[static_cast<size_t>(first + i)];
    message.entries[i] = {member.pid, member.name, member.process.valid()};
    if (member.process.valid()) descriptors.push_back(member.process.get());
  }
  return send_message(socket, &message, bytes_of(count), descriptors);
}

bool receive_words(int socket, MeetingHead* head, std::vector<Member>* members, Fd* file) {
  MeetingMessage message{};
  std::vector<Fd> descriptors;
  const ssize_t received = receive_message(socket, &message, sizeof message, &descriptors);
  if (received <= 0) return false;
  message.head.message[sizeof message.head.message - 1] = '\0';
  const int count = message.head.count;
  if (received < static_cast<ssize_t>(bytes_of(0)) || message.head.magic != kMagic ||
      message.head.version != kVersion || count < 0 || count > kRosterEntries ||
      received != static_cast<ssize_t>(bytes_of(count))) {
    throw_invalid("set-up: a rank runs another version of hsgd; install the same one everywhere");
  }
  take_members(message, std::move(descriptors), members, file);
  *head = message.head;
  return true;
}

}  // namespace hsgd
