// Gathers the ranks, then sends the rosters in turn.
#include "node/rendezvous/meeting_host.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "node/rendezvous/meeting_wait.hpp"
#include "node/rendezvous/unix_socket.hpp"

namespace hsgd {
namespace {

class Host {
 public:
  Host(const std::string& path, Listener& listener, const std::vector<int>& names, Member self,
       const Fd& file, const Deadline& deadline)
      : point_(meeting_point_of(path)),
        listener_(listener),
        names_(names),
        size_(static_cast<int>(names.size())),
        file_(file),
        deadline_(deadline) {
    members_.resize(names.size());
    guests_.resize(names.size());
    members_[0] = std::move(self);
  }

  std::vector<Member> gather_and_tell() {
    try {
      while (present_ < size_) wait_for_someone();
      const Member& self = members_[0];
      if (self.failed != HSGD_OK) throw Error(self.failed, self.name, self.failure);
      HSGD_FAULT_POINT("set-up: all have come");
      while (tell_some()) wait_until_taken();
    } catch (const Error& error) {
      const Error others = for_others(error, name_of(0));
      tell_everybody(failure_words(others.code(), others.rank(), others.what()),
                     error.code() == HSGD_ERR_INTERRUPTED);
      throw;
    }
    return std::move(members_);
  }

 private:
  // A rank that has introduced itself.
  struct Guest {
    Fd socket;
    int members_sent = 0;
    int under_way = 0;  // rosters that are not confirmed yet
  };
  // A connection of this user that has not been introduced or accepted yet.
  struct Stranger {
    Fd socket;
    bool knocked = false;  // has shown the guest's half of the secret
    bool invited = false;
    bool is_late = false;  // reports that its deadline has passed
  };

  // Sends the failure to all guests and strangers, which have not introduced themselves, and to
  // ranks that connect a moment later. So no rank waits a whole deadline for a rank that has left.
  void tell_everybody(const MeetingHead& failure, bool is_interrupted) {
    constexpr double kLateS = 1.0;
    constexpr int kLookMs = 20;
    // If there is a watch, it informs late ranks; and some of them may continue without this rank
    // by then.
    const bool may_be_late =
        !deadline_.has_watch() && !is_interrupted && failure.failed != HSGD_ERR_TIMEOUT;
    const Deadline late = deadline_.renewed(may_be_late ? kLateS : 0);
    const Deadline at_door = deadline_.renewed(kLateS);  // strangers may connect without end
    int informed = 0;
    const auto tell = [&](const auto& other) {
      if (!other.socket.valid()) return;
      send_words(other.socket.get(), failure);
      ++informed;
    };
    std::for_each(guests_.begin(), guests_.end(), tell);
    pollfd door{listener_.fd(), POLLIN, 0};
    for (;;) {
      do {
        std::for_each(strangers_.begin(), strangers_.end(), tell);
        strangers_.clear();  // frees descriptors for the next ones
      } while (!at_door.passed() && ::poll(&door, 1, 0) > 0 && let_in());
      if (informed >= size_ - 1 || late.passed() || late.interrupted()) return;
      ::poll(&door, 1, kLookMs);
    }
  }

  void wait_for_someone() {
    for (Stranger& stranger : strangers_) {
      if (stranger.knocked && !stranger.invited) invite(&stranger);
    }
    std::vector<pollfd> watched{{listener_.fd(), POLLIN, 0}};
    for (const Stranger& stranger : strangers_)
      watched.push_back({stranger.socket.get(), POLLIN, 0});
    std::vector<int> ranks;
    for (int rank = 1; rank < size_; ++rank) {
      const Fd& socket = guest(rank).socket;
      if (!socket.valid()) continue;
      watched.push_back({socket.get(), POLLIN, 0});
      ranks.push_back(rank);
    }
    if (!wait_readable(watched, deadline_)) {
      if (deadline_.passed()) fail_missing();
      return;
    }
    // Ranks in the queue are let in before any rank is reported missing, but not for ever.
    if (deadline_.passed() && is_too_late()) fail_missing();
    const size_t strangers = strangers_.size();
    bool news = watched[0].revents != 0;
    if (news) let_in();
    for (size_t i = strangers; i > 0; --i) {
      if (watched[i].revents == 0) continue;
      news = true;
      Stranger stranger = std::move(strangers_[i - 1]);
      strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i - 1));
      hear(std::move(stranger));
    }
    if (news) return;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (watched[1 + strangers + i].revents != 0) fail_left(ranks[i]);
    }
  }

  // Returns true if the wait must end, after the deadline with connections in the queue. This rank
  // may have been late, with all others waiting: so it continues while they come in one after
  // another.
  bool is_too_late() {
    constexpr double kNextS = 1.0;
    if (!overtime_) overtime_.emplace(deadline_.renewed(kNextS));
    return overtime_->passed();
  }

  // Accepts a connection. It is a stranger until it has introduced itself; no rank waits for that.
  bool let_in() {
    Fd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE)
        fail_system("set-up: accepting connections of ranks (ulimit -n)");
      return false;
    }
    if (peer_of(socket).is_trusted()) strangers_.push_back({std::move(socket)});
    return true;
  }

  void hear(Stranger stranger) {
    MeetingHead head;
    std::vector<Member> introduced;
    const int socket = stranger.socket.get();
    if (!receive_words(socket, &head, &introduced)) return;
    if (head.say == Say::kKnock && is_proof(head, point_.proof_of_guest())) {
      stranger.knocked = true;
      if (!invite(&stranger)) return;
    } else if (head.say == Say::kIntroduction && stranger.invited && introduced.size() == 1) {
      return admit(head, std::move(introduced[0]), std::move(stranger));
    } else if (head.say == Say::kFailure) {
      stranger.is_late = true;  // the host may have been late: which ranks are missing, if any?
    } else {
      return;
    }
    strangers_.push_back(std::move(stranger));
  }

  // Sends an invitation. Returns false if the stranger is gone. If the kernel has no room for the
  // descriptor now, the invitation is sent later.
  bool invite(Stranger* stranger) {
    MeetingHead invitation = words_of(Say::kInvitation, 0, size_);
    invitation.settings = members_[0].settings;
    show_proof(point_.proof_of_host(), &invitation);
    const Sent sent = send_words(stranger->socket.get(), invitation, file_.get());
    refused_ = sent == Sent::kLater ? errno : 0;
    stranger->invited = sent == Sent::kDone;
    return sent != Sent::kGone;
  }

  void admit(const MeetingHead& head, Member member, Stranger stranger) {
    const std::string complaint = complain_about(head, member);
    if (!complaint.empty() || head.failed != HSGD_OK) {
      strangers_.push_back(std::move(stranger));  // the failure is sent to it with the others
      if (!complaint.empty()) throw Error(HSGD_ERR_ARGUMENT, member.name, complaint);
      throw Error(static_cast<hsgd_status>(head.failed), member.name, head.message);
    }
    members_[static_cast<size_t>(head.rank)] = std::move(member);
    guest(head.rank).socket = std::move(stranger.socket);
    ++present_;
    overtime_.reset();
    if (stranger.is_late && present_ < size_) fail_missing();
  }

  std::string complain_about(const MeetingHead& head, const Member& member) {
    const bool known = head.rank >= 0 && head.rank < size_;
    if (head.size != size_) {
      return text("set-up at %s: rank %d has size %d, rank %d has size %d; give all ranks the same",
                  point_.name.c_str(), name_of(0), size_, member.name, head.size);
    }
    if (head.rank < 1 || !known || guest(head.rank).socket.valid()) {
      return text(
          "set-up at %s: rank %d joined twice (pids %d and %d); give each process its own rank",
          point_.name.c_str(), member.name,
          known ? members_[static_cast<size_t>(head.rank)].pid : -1, member.pid);
    }
    if (head.settings == members_[0].settings) return "";
    return text("set-up at %s: ranks %d and %d have different HSGD_* settings; use the same on all",
                point_.name.c_str(), name_of(0), member.name);
  }

  // Sends what can be sent now; returns false if all ranks have everything. The kernel bounds the
  // descriptors in flight between all processes of a user (RLIMIT_NOFILE; only root may have more),
  // and each of N ranks gets N of them. So only a few rosters are sent at a time, and the next ones
  // after those are confirmed.
  bool tell_some() {
    constexpr int kMostUnderWay = 2 * kMostDescriptors;
    for (int to = 1; to < size_; ++to) {
      Guest& other = guest(to);
      if (other.members_sent == 0 && other.socket.valid() && to == size_ - 1) {
        HSGD_FAULT_POINT("set-up: all but one are told");
      }
      while (other.socket.valid() && other.members_sent < size_) {
        const int count = std::min(kRosterEntries, size_ - other.members_sent);
        const int descriptors = std::min(kRosterEntries, size_);
        if ((under_way_ + 1) * descriptors > kMostUnderWay && under_way_ > 0) return true;
        MeetingHead head = words_of(Say::kRoster, other.members_sent, size_);
        head.settings = members_[0].settings;
        const Sent sent =
            send_members(other.socket.get(), head, members_, other.members_sent, count);
        if (sent == Sent::kLater) {
          refused_ = errno;
          return true;
        }
        if (sent == Sent::kGone) {
          forget(&other);
          break;
        }
        other.members_sent += count;
        ++other.under_way;
        ++under_way_;
      }
    }
    return false;
  }

  // Returns when a roster is confirmed, or soon if nothing could be sent.
  void wait_until_taken() {
    std::vector<pollfd> watched;
    std::vector<int> ranks;
    for (int rank = 1; rank < size_; ++rank) {
      if (guest(rank).under_way == 0) continue;
      watched.push_back({guest(rank).socket.get(), POLLIN, 0});
      ranks.push_back(rank);
    }
    const int refused = std::exchange(refused_, 0);
    if (refused != 0) {
      look_around(deadline_);
      ::poll(watched.data(), watched.size(), static_cast<int>(kLongestPauseMs));
    } else {
      wait_readable(watched, deadline_);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (watched[i].revents != 0) hear_confirmation(&guest(ranks[i]));
    }
    if (!deadline_.passed()) return;
    if (ranks.empty()) fail_full(point_.name, refused, deadline_);
    throw_error(HSGD_ERR_TIMEOUT, name_of(ranks[0]),
                "set-up at %s: rank %d (pid %d) did not read what it was sent within %g s; it "
                "is stopped, or busy elsewhere",
                point_.name.c_str(), name_of(ranks[0]), members_[static_cast<size_t>(ranks[0])].pid,
                deadline_.timeout_s());
  }

  void hear_confirmation(Guest* other) {
    MeetingHead head;
    std::vector<Member> none;
    if (!receive_words(other->socket.get(), &head, &none)) return forget(other);
    if (head.say != Say::kReceived || other->under_way == 0) return;
    --other->under_way;
    --under_way_;
  }

  // Drops a guest that is gone. The others continue, and learn its fate from its process and its
  // memory.
  void forget(Guest* other) {
    under_way_ -= std::exchange(other->under_way, 0);
    other->socket = Fd();
  }

  // Throws because a rank left. After its introduction a rank sends only a complaint that its
  // deadline has passed.
  [[noreturn]] void fail_left(int rank) {
    MeetingHead complaint;
    std::vector<Member> none;
    if (receive_words(guest(rank).socket.get(), &complaint, &none)) fail_missing();
    look_for_the_cause(deadline_);
    const Member& lost = members_[static_cast<size_t>(rank)];
    throw_error(HSGD_ERR_PEER_LOST, lost.name,
                "set-up at %s: rank %d (pid %d) left before the set-up was complete; look at "
                "its output",
                point_.name.c_str(), lost.name, lost.pid);
  }

  [[noreturn]] void fail_missing() {
    if (refused_ != 0) fail_full(point_.name, refused_, deadline_);
    std::string missing;
    int first = -1;
    for (int rank = 1; rank < size_; ++rank) {
      if (guest(rank).socket.valid()) continue;
      if (first < 0) first = name_of(rank);
      missing += (missing.empty() ? "" : ", ") + std::to_string(name_of(rank));
    }
    throw_error(HSGD_ERR_TIMEOUT, first,
                "set-up at %s: of %d ranks, rank(s) %s did not join within %g s; check that "
                "they were started and make this communicator",
                point_.name.c_str(), size_, missing.c_str(), deadline_.timeout_s());
  }

  Guest& guest(int rank) { return guests_[static_cast<size_t>(rank)]; }
  int name_of(int rank) const { return names_[static_cast<size_t>(rank)]; }

  const MeetingPoint point_;
  Listener& listener_;
  const std::vector<int>& names_;
  const int size_;
  const Fd& file_;
  const Deadline& deadline_;
  std::optional<Deadline> overtime_;  // for the next rank, after the deadline
  int present_ = 1;
  int under_way_ = 0;  // rosters
  int refused_ = 0;    // errno of the last refused message
  std::vector<Member> members_;
  std::vector<Guest> guests_;  // by rank
  std::vector<Stranger> strangers_;
};

}  // namespace

std::vector<Member> host_meeting(const std::string& path, Listener& listener,
                                 const std::vector<int>& names, Member self, const Fd& file,
                                 const Deadline& deadline) {
  return Host(path, listener, names, std::move(self), file, deadline).gather_and_tell();
}

}  // namespace hsgd
