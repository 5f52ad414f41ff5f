// Regroup: the ranks of a node that are left after a failure agree which of them continue, and form
// a new group.
//
// The protocol runs in the shared memory of the old group: memory outlives its owner, so a
// compare-and-swap in it is a final decision, no matter which rank dies at which moment. In each
// round the ranks write that they came. When no living rank is missing, or at the deadline, one
// rank decides which ranks continue. These make the new group, which is valid once all of them have
// it. A rank that dies or stops before that costs a round. Never touches the data of collectives,
// and writes only one word in segments of others: the decision.
#ifndef HSGD_NODE_SEGMENTS_SURVIVORS_HPP_
#define HSGD_NODE_SEGMENTS_SURVIVORS_HPP_

#include <functional>
#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/segments/node_group.hpp"

namespace hsgd {

// Throws HSGD_ERR_CLOSED if the other ranks continued without this one.
void check_left_out(const LocalGroup& local);

class Regroup final : private Watch {
 public:
  // Input from which the members of a round make their new group.
  struct Round {
    const std::vector<int>& members;  // old local ranks, in order; includes this rank
    std::string path;                 // where they meet
    Watch* watch;                     // throws if the round cannot succeed any more
  };
  using Make = std::function<void(const Round&)>;

  // `timeout_s`: how long to wait for living ranks, in each of the two phases of a round.
  // `keeps_names`: errors of the new group call its ranks as those of the old one do; otherwise by
  // their ranks in the new one.
  Regroup(LocalGroup& local, double timeout_s, Deadline::Interrupted interrupted, bool keeps_names);

  // Collective over the ranks that are left. Calls `make` in each round; if it throws
  // HSGD_ERR_PEER_LOST or HSGD_ERR_TIMEOUT, the next round begins. Returns once all members of the
  // round have returned from `make`; then run() returns on all of them.
  void run(const Make& make);

 private:
  void go_on(const Make& make);
  void gather();
  void decide();
  bool take_part(const Make& make);
  void stay_outside();
  void leave();
  template <class Reached>
  void wait_until(Reached&& reached);
  void check() override;
  void check_members() const;
  void look_who_left();
  bool everybody_came() const;
  bool everybody_joined() const;
  bool is_over() const { return state().load() != round_; }  // this phase of the round is over
  bool move_to(uint64_t next);
  std::atomic<uint64_t>& state() const { return local_.survival(0).state; }
  Survival& own() const { return local_.survival(local_.rank()); }

  LocalGroup& local_;
  double timeout_s_;
  Deadline::Interrupted interrupted_;
  bool keeps_names_;
  Deadline deadline_;         // of the current phase
  uint64_t round_ = 0;        // the state on which this rank acts
  std::vector<bool> left_;    // ranks that ended or closed, as far as seen
  std::vector<int> members_;  // of the round, if this rank is one of them
  MeetingWords meeting_{};    // where the members meet
  std::string last_failure_;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_SURVIVORS_HPP_
