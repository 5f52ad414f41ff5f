// Connects, checks the proofs, introduces this rank and receives the rosters.
#include "node/rendezvous/meeting_guest.hpp"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "node/rendezvous/meeting_wait.hpp"
#include "node/rendezvous/unix_socket.hpp"

namespace hsgd {
namespace {

constexpr int64_t kTurnMs = 50;  // one wait in the queue for a connection

class Guest {
 public:
  Guest(const std::string& path, int rank, const std::vector<int>& names, const Deadline& deadline)
      : point_(meeting_point_of(path)),
        rank_(rank),
        size_(static_cast<int>(names.size())),
        host_(names.front()),
        deadline_(deadline) {}

  std::vector<Member> join(Member self, const MeetingFile& file) {
    connect();
    HSGD_FAULT_POINT("set-up: connected");
    MeetingHead knock = words_of(Say::kKnock, rank_, size_);
    show_proof(point_.proof_of_guest(), &knock);
    send_until(point_.name, deadline_, [&] { return send_words(socket_.get(), knock); });
    std::vector<Member> members;
    Fd shared;
    const MeetingHead invitation = await(Say::kInvitation, &members, &shared);
    if (!is_proof(invitation, point_.proof_of_host())) {
      throw_error(HSGD_ERR_ARGUMENT, host_,
                  "set-up at %s: the process that listens there (pid %d) is not rank %d: it "
                  "does not know the secret in the path; give each job its own path",
                  point_.name.c_str(), peer_of(socket_).pid, host_);
    }
    // Otherwise the meeting fails, and rank 0 reports why.
    const bool fits = invitation.size == size_ && invitation.settings == self.settings;
    if (shared.valid() && fits && self.failed == HSGD_OK) self.prepare(file, std::move(shared));
    introduce(std::move(self));
    HSGD_FAULT_POINT("set-up: introduced");
    while (static_cast<int>(members.size()) < size_) {
      await(Say::kRoster, &members);
      const MeetingHead received = words_of(Say::kReceived, rank_, size_);
      send_until(point_.name, deadline_, [&] { return send_words(socket_.get(), received); });
    }
    return members;
  }

 private:
  void connect() {
    const Address address = address_of(point_.name);
    int error = 0;
    for (int64_t pause = 1;; pause = std::min<int64_t>(kLongestPauseMs, pause * 2)) {
      socket_ = new_socket();
      if (try_connect(socket_, address, kTurnMs)) break;
      error = errno;
      if (error != ENOENT && error != ECONNREFUSED && error != EAGAIN && error != EINTR) {
        fail_system(("set-up: connecting to " + point_.name).c_str());
      }
      look_around(deadline_);
      if (deadline_.passed()) fail_alone(error);
      if (error != EAGAIN) pause_ms(pause);
    }
    const Peer host = peer_of(socket_);
    if (host.is_trusted()) return;
    look_for_the_cause(deadline_);
    throw_error(HSGD_ERR_ARGUMENT, host_,
                "set-up at %s: a process of another user (uid %u, pid %d) listens there "
                "instead of rank %d; nothing was sent to it; give the job a path that other "
                "users cannot guess or take",
                point_.name.c_str(), host.user, host.pid, host_);
  }

  [[noreturn]] void fail_alone(int error) const {
    const char* why =
        error == EAGAIN
            ? "a process listens there but accepts no connections; it is stopped, or busy elsewhere"
            : "start all ranks with the same path";
    throw_error(HSGD_ERR_TIMEOUT, host_, "set-up at %s: rank %d did not join within %g s; %s",
                point_.name.c_str(), host_, deadline_.timeout_s(), why);
  }

  void introduce(Member self) {
    MeetingHead head = failure_words(self.failed, rank_, self.failure);
    head.say = Say::kIntroduction;
    head.size = size_;
    head.settings = self.settings;
    std::vector<Member> own;
    own.push_back(std::move(self));
    send_until(point_.name, deadline_,
               [&] { return send_members(socket_.get(), head, own, 0, 1); });
    if (own[0].failed != HSGD_OK) throw Error(own[0].failed, own[0].name, own[0].failure);
  }

  // Returns the host's next message. If the message is a failure, throws it.
  MeetingHead await(Say wanted, std::vector<Member>* members, Fd* file = nullptr) {
    wait_for_word();
    MeetingHead head;
    if (!receive_words(socket_.get(), &head, members, file)) {
      look_for_the_cause(deadline_);
      throw_error(HSGD_ERR_PEER_LOST, host_,
                  "set-up at %s: rank %d left before the set-up was complete; look at its output",
                  point_.name.c_str(), host_);
    }
    if (head.failed != HSGD_OK) {
      throw Error(static_cast<hsgd_status>(head.failed), head.rank, head.message);
    }
    if (head.say != wanted) {
      throw_error(HSGD_ERR_ARGUMENT, host_,
                  "set-up at %s: rank %d (pid %d) sent an unexpected message; use the same "
                  "version of hsgd on every rank",
                  point_.name.c_str(), host_, peer_of(socket_).pid);
    }
    return head;
  }

  // Waits for a message. After the deadline it waits a little longer: rank 0 may have come later
  // and can still report which ranks are missing.
  void wait_for_word() {
    constexpr double kAnswerS = 1.0;
    std::vector<pollfd> watched{{socket_.get(), POLLIN, 0}};
    if (!complained_ && wait_readable_until(watched, deadline_)) return;
    if (!complained_) {
      complained_ = true;
      answer_by_ = deadline_.renewed(kAnswerS);
      send_words(socket_.get(), failure_words(HSGD_ERR_TIMEOUT, rank_, ""));
    }
    if (wait_readable_until(watched, answer_by_)) return;
    throw_error(HSGD_ERR_TIMEOUT, host_,
                "set-up at %s: rank %d did not answer within %g s; it is stopped, or busy "
                "elsewhere",
                point_.name.c_str(), host_, deadline_.timeout_s());
  }

  const MeetingPoint point_;
  const int rank_;
  const int size_;
  const int host_;  // rank 0's name in errors
  const Deadline& deadline_;
  Fd socket_;
  bool complained_ = false;
  Deadline answer_by_{0.0};
};

}  // namespace

std::vector<Member> join_meeting(const std::string& path, int rank, const std::vector<int>& names,
                                 Member self, const MeetingFile& file, const Deadline& deadline) {
  return Guest(path, rank, names, deadline).join(std::move(self), file);
}

}  // namespace hsgd
