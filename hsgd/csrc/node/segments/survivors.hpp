// The ranks of a node that are left after a failure agree on who goes on, and form a new group.
//
// Owns the protocol, which runs in the shared memory of the old group: memory outlives its owner,
// so a compare-and-swap in it decides once and for all, whoever dies at whatever moment. In each
// round the ranks say that they came; when nobody that lives is missing, or at the deadline,
// somebody decides who goes on; these make the new group, and it counts when all of them have it.
// Who dies or stops before that costs a round. Never touches the data of collectives, and writes
// nothing into segments of others but the one word that decides.
#ifndef HSGD_NODE_SEGMENTS_SURVIVORS_HPP_
#define HSGD_NODE_SEGMENTS_SURVIVORS_HPP_

#include <functional>
#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/segments/node_group.hpp"

namespace hsgd {

// Throws HSGD_ERR_CLOSED when the other ranks went on without this one.
void check_left_out(const LocalGroup& local);

class Regroup final : private Watch {
 public:
  // What the members of a round make their new group of.
  struct Round {
    const std::vector<int>& members;  // old local ranks, in order; this one is among them
    std::string path;                 // where they meet
    Watch* watch;                     // throws when the round cannot succeed any more
  };
  using Make = std::function<void(const Round&)>;

  // `timeout_s`: how long living ranks are waited for, in each of the two phases of a round.
  Regroup(LocalGroup& local, double timeout_s, Deadline::Interrupted interrupted);

  // Collective over the ranks that are left. Calls `make` in each round, where HSGD_ERR_PEER_LOST
  // and HSGD_ERR_TIMEOUT lead to the next one. Returns when all members of the round have returned
  // from `make`, and all of them will return from here.
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
  bool is_over() const { return state().load() != round_; }  // this phase of the round
  bool move_to(uint64_t next);
  std::atomic<uint64_t>& state() const { return local_.survival(0).state; }
  Survival& own() const { return local_.survival(local_.rank()); }

  LocalGroup& local_;
  double timeout_s_;
  Deadline::Interrupted interrupted_;
  Deadline deadline_;         // of the current phase
  uint64_t round_ = 0;        // the state that this rank acts upon
  std::vector<bool> left_;    // who ended or closed, as far as seen
  std::vector<int> members_;  // of the round, when this rank is one of them
  MeetingWords meeting_{};    // where those meet
  std::string last_failure_;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_SURVIVORS_HPP_
