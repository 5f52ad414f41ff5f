// What a rank knows of its peers on the node: which died, left, gave up or are late; and the error
// texts.
#include <algorithm>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/os/process_life.hpp"
#include "core/os/wait.hpp"
#include "node/segments/node_group.hpp"

namespace hsgd {
namespace {

constexpr int64_t kLongNs = 100'000'000;  // waiting ranks look at their peers more often

}  // namespace

bool LocalGroup::died(int rank) const { return peers_[static_cast<size_t>(rank)].process->ended(); }

bool LocalGroup::has_left(int rank) const {
  if (control(rank).closed.load(std::memory_order_acquire) != 0) return true;
  settings_.processes->look();
  return died(rank);
}

std::string LocalGroup::person(int rank) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  return text("rank %d (pid %d, %s)", peer.name, peer.pid, node_name_.c_str());
}

void LocalGroup::explain_leaving(const std::string& words) {
  constexpr size_t kMost = sizeof Control::leaving;
  char* const leaving = control(rank()).leaving;
  const size_t kept = words.copy(leaving, kMost);
  if (kept < kMost) leaving[kept] = '\0';
}

// Returns why another rank left. Call it after its `closed` was seen: the text was written before.
std::string LocalGroup::closing(int rank) const {
  const std::string words = foreign_words(control(rank).leaving, sizeof Control::leaving);
  return person(rank) + " " + (words.empty() ? "closed its communicator" : words);
}

void LocalGroup::see_who_waits(uint64_t sequence) {
  const int64_t now = now_ns();
  const bool first = sequence != waiting_in_;
  waiting_in_ = sequence;
  control(rank()).looks.fetch_add(1, std::memory_order_relaxed);
  for (int peer = 0; peer < size(); ++peer) {
    const uint32_t looks = control(peer).looks.load(std::memory_order_relaxed);
    Peer& seen = peers_[static_cast<size_t>(peer)];
    if (first || looks != seen.looks) seen.looked_at_ns = now;
    seen.looks = looks;
  }
}

// Returns the ranks that have not looked at their peers for long while this rank waited: they work
// or hang. The rank with the oldest look comes first.
std::vector<int> LocalGroup::who_does_not_wait() const {
  const int64_t now = now_ns();
  const auto age_ns = [&](int peer) {
    return now - peers_[static_cast<size_t>(peer)].looked_at_ns;
  };
  std::vector<int> peers;
  int64_t oldest_ns = kLongNs;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    peers.push_back(peer);
    oldest_ns = std::max(oldest_ns, age_ns(peer));
  }
  std::sort(peers.begin(), peers.end(), [&](int a, int b) { return age_ns(a) > age_ns(b); });
  const auto busy = [&](int peer) { return age_ns(peer) > std::max(kLongNs, oldest_ns / 2); };
  peers.erase(std::find_if_not(peers.begin(), peers.end(), busy), peers.end());
  return peers;
}

int LocalGroup::awaited(uint64_t sequence) const {
  const int64_t now = now_ns();
  int silent = -1;
  int64_t oldest_ns = kLongNs;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    if (!is_open(peer, sequence)) return peer;
    const int64_t age_ns = now - peers_[static_cast<size_t>(peer)].looked_at_ns;
    if (age_ns <= oldest_ns) continue;
    oldest_ns = age_ns;
    silent = peer;
  }
  return silent;
}

bool LocalGroup::is_first_to_give_up() { return survival(0).gave_up.exchange(1) == 0; }

bool LocalGroup::is_first_that_waits() const {
  const int64_t now = now_ns();
  const auto end = peers_.begin() + rank();
  return std::none_of(peers_.begin(), end,
                      [&](const Peer& peer) { return now - peer.looked_at_ns <= kLongNs; });
}

void LocalGroup::check_peers(uint64_t sequence, const std::string& what) const {
  // Errors of ranks that gave up come first: such a rank may have ended since, but is not the
  // cause.
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const Failure& failure = control(peer).failure;
    const int32_t code = failure.code.load(std::memory_order_acquire);  // partner: write_failure()
    if (code == 0 || failure.first_missed > sequence) continue;  // it did its part of this one
    throw Error(static_cast<hsgd_status>(code), failure.rank,
                foreign_words(failure.message, sizeof failure.message));
  }
  settings_.processes->look();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) fail_if_dead(peer, what);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    // A rank that closed its communicator may have finished this collective before; then it delays
    // no rank.
    if (control(peer).closed.load(std::memory_order_acquire) == 0 || is_open(peer, sequence))
      continue;
    throw Error(HSGD_ERR_PEER_LOST, name(peer), what + ": " + closing(peer));
  }
}

void LocalGroup::check_alive(int rank, const std::string& what) const {
  settings_.processes->look();
  fail_if_dead(rank, what);
}

void LocalGroup::fail_if_dead(int rank, const std::string& what) const {
  if (!died(rank)) return;
  // A rank that closed its communicator and then ended is no error: others may need nothing more of
  // it. The order matters: a rank that ended between the two looks had closed before.
  if (control(rank).closed.load(std::memory_order_acquire) != 0) return;
  throw Error(HSGD_ERR_PEER_LOST, name(rank), what + ": " + person(rank) + " died");
}

std::string LocalGroup::missing(uint64_t sequence, int* first) const {
  std::string names;
  *first = -1;
  const auto add = [&](int peer) {
    if (*first < 0) *first = name(peer);
    names += (names.empty() ? "" : ", ") + person(peer);
  };
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !is_open(peer, sequence)) add(peer);
  }
  if (!names.empty()) return names + " did not call it";
  for (const int peer : who_does_not_wait()) add(peer);
  if (!names.empty()) return names + " did not make progress in it";
  if (settings_.one_out_ring) return "still waiting for another node";
  uint64_t least = UINT64_MAX;  // all ranks wait for one another
  const auto behind = [&](int peer) {
    const Progress& progress = control(peer).progress;
    return progress.staged.load(std::memory_order_relaxed) +
           progress.reduced.load(std::memory_order_relaxed) +
           progress.gathered.load(std::memory_order_relaxed);
  };
  for (int peer = 0; peer < size(); ++peer) least = std::min(least, behind(peer));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && behind(peer) == least) add(peer);
  }
  return names + " did not make progress in it";
}

}  // namespace hsgd
