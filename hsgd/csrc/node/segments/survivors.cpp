// Rounds of agreement in shared memory.
#include "node/segments/survivors.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

enum class Phase : uint64_t { kOpen = 0, kDecided = 1, kSettled = 2 };

// Packs the word that decides: number of the round, its phase, and the rank that decided.
constexpr uint64_t pack(uint64_t round, Phase phase, int decider) {
  return round << 32 | static_cast<uint64_t>(phase) << 16 | static_cast<uint64_t>(decider);
}
constexpr uint64_t number_of(uint64_t state) { return state >> 32; }
constexpr Phase phase_of(uint64_t state) { return static_cast<Phase>(state >> 16 & 0xffff); }
constexpr int decider_of(uint64_t state) { return static_cast<int>(state & 0xffff); }
static_assert(Survival::kMostRanks <= 0x10000);
constexpr uint64_t next_round(uint64_t state) {
  return pack(number_of(state) + 1, Phase::kOpen, 0);
}

// Reads the members that `state` decided on, and where they meet. Returns false if the state has
// changed meanwhile: then the decider may have written other members.
bool read_members(const LocalGroup& local, uint64_t state, std::vector<int>* members,
                  MeetingWords* meeting = nullptr) {
  const Survival& decider = local.survival(decider_of(state));
  members->clear();
  for (int rank = 0; rank < local.size(); ++rank) {
    const uint64_t word = decider.members[rank / 64].load(std::memory_order_relaxed);
    if ((word >> rank % 64 & 1) != 0) members->push_back(rank);
  }
  for (size_t i = 0; meeting != nullptr && i < meeting->size(); ++i) {
    (*meeting)[i] = decider.meeting[i].load(std::memory_order_relaxed);
  }
  // Partner: decide(), which stores only after it has seen a change of the state. Keeps the state
  // from being read before the members.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return local.survival(0).state.load() == state;
}

bool contains(const std::vector<int>& members, int rank) {
  return std::find(members.begin(), members.end(), rank) != members.end();
}

}  // namespace

void check_left_out(const LocalGroup& local) {
  const uint64_t state = local.survival(0).state.load();
  std::vector<int> members;
  if (phase_of(state) != Phase::kSettled || !read_members(local, state, &members)) return;
  if (contains(members, local.rank())) return;
  std::string names;
  for (const int member : members) {
    names += (names.empty() ? "" : ", ") + std::to_string(local.name(member));
  }
  const int me = local.name(local.rank());
  throw_error(HSGD_ERR_CLOSED, me,
              "rank %d (this process) was left out: it did not call shrink() in time, and "
              "rank(s) %s continued without it; end it, or restart it as a new rank",
              me, names.c_str());
}

Regroup::Regroup(LocalGroup& local, double timeout_s, Deadline::Interrupted interrupted,
                 bool keeps_names)
    : local_(local),
      timeout_s_(timeout_s),
      interrupted_(interrupted),
      keeps_names_(keeps_names),
      deadline_(timeout_s),
      left_(static_cast<size_t>(local.size())) {
  if (local.size() > Survival::kMostRanks) {
    throw_invalid("shrink: %d ranks share this node; shrink() supports at most %d", local.size(),
                  Survival::kMostRanks);
  }
}

void Regroup::run(const Make& make) {
  try {
    go_on(make);
  } catch (...) {
    leave();
    throw;
  }
}

void Regroup::go_on(const Make& make) {
  for (int failures = 0; failures <= local_.size();) {
    round_ = state().load();
    members_.clear();
    if (phase_of(round_) == Phase::kOpen) {
      gather();
      continue;
    }
    check_left_out(local_);
    std::vector<int> members;
    if (!read_members(local_, round_, &members, &meeting_)) continue;
    if (phase_of(round_) == Phase::kSettled) {
      throw_error(HSGD_ERR_CLOSED, -1,
                  "shrink: this communicator was shrunk before; use the communicator that shrink() "
                  "returned then");
    }
    if (!contains(members, local_.rank())) {
      stay_outside();
      continue;
    }
    members_ = std::move(members);
    if (take_part(make)) return;
    ++failures;
  }
  throw Error(
      HSGD_ERR_TIMEOUT, -1,
      "shrink: the ranks could not form a new group; the last failure was: " + last_failure_);
}

// Writes that this rank came, and waits for the others.
void Regroup::gather() {
  own().came.store(number_of(round_) + 1);
  local_.wake_all();
  HSGD_FAULT_POINT("shrink: came");
  deadline_ = Deadline(timeout_s_);
  look_who_left();
  wait_until([&] { return everybody_came() || deadline_.passed(); });
  if (!is_over()) decide();
}

void Regroup::decide() {
  look_who_left();
  std::vector<uint64_t> words(Survival::kMostRanks / 64);
  for (int rank = 0; rank < local_.size(); ++rank) {
    const bool came = local_.survival(rank).came.load() == number_of(round_) + 1;
    if (came && !left_[static_cast<size_t>(rank)]) words[rank / 64] |= uint64_t{1} << rank % 64;
  }
  for (size_t i = 0; i < words.size(); ++i) {
    own().members[i].store(words[i], std::memory_order_relaxed);
  }
  const MeetingWords meeting = draw_meeting_words();
  for (size_t i = 0; i < meeting.size(); ++i) {
    own().meeting[i].store(meeting[i], std::memory_order_relaxed);
  }
  HSGD_FAULT_POINT("shrink: about to decide");
  // Partner: read_members(). A rank that sees the decision sees its members. Only the first
  // decision of a round succeeds.
  move_to(pack(number_of(round_), Phase::kDecided, local_.rank()));
  HSGD_FAULT_POINT("shrink: decided");
}

// Makes the new group. Returns true if all members have it.
bool Regroup::take_part(const Make& make) {
  const uint64_t settled = pack(number_of(round_), Phase::kSettled, decider_of(round_));
  deadline_ = Deadline(timeout_s_);
  try {
    check();
    make({members_, meeting_path(meeting_), this});
    HSGD_FAULT_POINT("shrink: made");
    own().joined.store(number_of(round_) + 1);
    local_.wake_all();
    HSGD_FAULT_POINT("shrink: joined");
    wait_until([&] { return everybody_joined(); });
    move_to(settled);
  } catch (const Error& error) {
    // The failure of another member, such as out of memory, has its name in the new group.
    const auto number =
        std::find(members_.begin(), members_.end(), local_.rank()) - members_.begin();
    const auto me = keeps_names_ ? local_.name(local_.rank()) : static_cast<int>(number);
    const bool of_another = error.rank() >= 0 && error.rank() != me;
    const bool is_lost = error.code() == HSGD_ERR_PEER_LOST || error.code() == HSGD_ERR_TIMEOUT;
    if (!is_lost && !of_another) throw;
    last_failure_ = error.what();
    move_to(next_round(round_));
  }
  if (state().load() != settled) return false;
  HSGD_FAULT_POINT("shrink: settled");
  return true;
}

// Waits while the others, which decided without this rank, form a group. If they fail, this rank
// may join the next round.
void Regroup::stay_outside() {
  deadline_ = Deadline(timeout_s_);
  wait_until([&] {
    if (!deadline_.passed()) return false;
    throw_error(HSGD_ERR_TIMEOUT, -1, "shrink: the other ranks did not form a group within %g s",
                timeout_s_);
  });
}

// Gives up: no rank needs to wait for this one.
void Regroup::leave() {
  own().came.store(0);
  if (!members_.empty()) move_to(next_round(round_));
  local_.wake_all();
}

bool Regroup::move_to(uint64_t next) {
  uint64_t expected = round_;
  const bool moved = state().compare_exchange_strong(expected, next);
  if (moved) local_.wake_all();
  return moved;
}

// Also returns if the phase is over.
template <class Reached>
void Regroup::wait_until(Reached&& reached) {
  constexpr int64_t kLongestSleepNs = 20'000'000;
  local_.waiter().run([&] { return is_over() || reached() ? Step::kDone : Step::kIdle; }, *this,
                      kLongestSleepNs);
}

void Regroup::check() {
  if (interrupted_ != nullptr && interrupted_() != 0) {
    throw_error(HSGD_ERR_INTERRUPTED, -1, "shrink: interrupted");
  }
  look_who_left();
  if (!members_.empty()) check_members();
}

void Regroup::check_members() const {
  if (is_over()) throw_error(HSGD_ERR_PEER_LOST, -1, "shrink: another rank gave up this attempt");
  for (const int member : members_) {
    const bool left = left_[static_cast<size_t>(member)];
    if (!left && local_.survival(member).came.load() == number_of(round_) + 1) continue;
    throw Error(HSGD_ERR_PEER_LOST, local_.name(member),
                "shrink: " + local_.person(member) + (left ? " left" : " gave up"));
  }
  if (!deadline_.passed()) return;
  for (const int member : members_) {
    if (local_.survival(member).joined.load() == number_of(round_) + 1) continue;
    throw_error(HSGD_ERR_TIMEOUT, local_.name(member), "shrink: %s did not join within %g s",
                local_.person(member).c_str(), timeout_s_);
  }
}

void Regroup::look_who_left() {
  for (int rank = 0; rank < local_.size(); ++rank) {
    const auto i = static_cast<size_t>(rank);
    left_[i] = left_[i] || (rank != local_.rank() && local_.has_left(rank));
  }
}

bool Regroup::everybody_came() const {
  for (int rank = 0; rank < local_.size(); ++rank) {
    if (left_[static_cast<size_t>(rank)]) continue;
    if (local_.survival(rank).came.load() != number_of(round_) + 1) return false;
  }
  return true;
}

bool Regroup::everybody_joined() const {
  return std::all_of(members_.begin(), members_.end(), [&](int member) {
    return local_.survival(member).joined.load() == number_of(round_) + 1;
  });
}

}  // namespace hsgd
