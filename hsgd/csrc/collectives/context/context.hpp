// Context: gives collectives the ranks of the node, the links between nodes, and agreement on one
// collective at a time.
//
// Owns the sequence of collectives, the comparison of their signatures, the deadline of waits, and
// the buffers that all ranks of the node can reach. Implements no collective: each is a function
// that gets a context. The communicator runs one collective at a time, and none after an error.
#ifndef HSGD_COLLECTIVES_CONTEXT_CONTEXT_HPP_
#define HSGD_COLLECTIVES_CONTEXT_CONTEXT_HPP_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/context/links.hpp"
#include "collectives/context/operation.hpp"
#include "collectives/context/place.hpp"
#include "collectives/context/statistics.hpp"
#include "collectives/context/step_sizes.hpp"
#include "collectives/context/store_tuner.hpp"
#include "collectives/context/trace.hpp"
#include "core/os/wait.hpp"
#include "core/status/status_note.hpp"
#include "network/rounds/rank_blocks.hpp"
#include "network/rounds/round_schedule.hpp"
#include "node/segments/node_group.hpp"
#include "node/segments/symmetric_memory.hpp"

namespace hsgd {

// The right to move data. kOnNode: the headers of this node agree; its first step may be reduced
// and sent together with the headers, but no output may be written. kGranted: all headers agree.
enum class Permission { kUnknown, kOnNode, kGranted };

// The data that the first leader sends to the other nodes together with the headers.
struct Outgoing {
  Payload payload;
  MergeFn merge;                // null if no node has a payload
  std::byte* result = nullptr;  // receives the merged payloads of all nodes
  ExchangeNote note;
  RoundPayload* first_step = nullptr;  // the first step of a pipeline, instead of a payload
};

// Returns the first step of a pipeline on the first leader as soon as it can travel with the
// headers; nullptr if it travels after them, on its own.
using FirstStepFn = std::function<std::optional<RoundPayload*>()>;

class Context final : private Watch {
 public:
  // Connects the ranks of the node; all of them must call it. `path` and `listener` are as in
  // meet(); `transport` is set on leaders only. While this rank waits, it calls `watch`, if not
  // null, until end_setup().
  Context(const std::string& path, Listener* listener, Place place,
          std::unique_ptr<Transport> transport, const hsgd_options& options, Watch* watch);
  ~Context() override;
  // Ends the set-up: resets the counters of users. The set-up counts as `collectives` collectives,
  // the same number on all nodes.
  void end_setup(uint64_t collectives);

  // --- participants and settings ---
  const Place& place() const { return place_; }
  bool one_node() const { return place_.node_count == 1; }
  const NodeMap& map() const { return map_; }
  const RoundSchedule& rounds() const { return rounds_; }
  int world_rank_of(int local_rank) const {
    return map_.rank(map_.first(map_.node()) + local_rank);
  }
  int local_rank_of(int world_rank) const;  // -1: on another node
  int node_of(int world_rank) const;        // -1: not in this communicator
  const hsgd_options& options() const { return options_; }
  size_t slots() const { return options_.slots; }
  Isa isa() const { return kernels_.isa; }
  CopyFn copy() const { return kernels_.copy; }
  StepSizes& sizes() { return sizes_; }
  const StepSizes& sizes() const { return sizes_; }
  StoreTuner& stores() { return stores_; }
  Statistics& statistics() { return statistics_; }
  const Statistics& statistics() const { return statistics_; }
  uint64_t& intra_bytes() { return statistics_.counters.intra_bytes; }
  Recorder& recorder() { return recorder_; }
  hsgd_record* record() { return recorder_.current(); }
  LocalGroup& local() const { return *group_; }
  Links& links() { return *links_; }
  const Links& links() const { return *links_; }
  Arena& arena() { return arena_; }
  // Returns true if buffers were ever allocated; changes in the same collective on all ranks.
  bool shares() const { return shares_; }
  void set_shares() { shares_ = true; }
  std::vector<const void*>& inputs() { return inputs_; }  // one entry per node or rank of the node

  // --- one collective: this rank begins it, opens it, then finishes it ---
  void begin(const Signature& signature, const hsgd_label* label);
  void restart_deadline() { deadline_.reset(); }
  void forget_label() { call_.label = nullptr; }  // the label belongs to the caller
  uint64_t sequence() const { return call_.sequence; }
  uint64_t user_sequence() const { return call_.sequence - first_sequence_; }
  uint64_t base() const { return base_; }  // pipeline steps so far
  std::string what() const;                // for messages
  // Publishes the header, and `bytes` of payload beside it. If local().combines(), one rank calls
  // `combine` after all ranks of the node have opened the collective with equal headers and before
  // any rank is notified.
  void open(const Operation& operation, const void* payload, size_t bytes,
            const std::function<void()>& combine = nullptr);
  bool is_open() const { return group_->is_open(place_.local_rank, call_.sequence); }
  // Declares that this rank has finished with `steps` steps, also if it took no part in them.
  void finish_steps(uint64_t steps);
  // Skips the steps of a refused collective, so that data staged for it is never read as a step of
  // a later one.
  void skip_steps();

  // Calls `step`, which must not block, until it returns kDone. Throws if the wait cannot succeed
  // any more.
  template <class StepFunction>
  void wait(StepFunction&& step) {
    // MPI makes progress only when it is called.
    constexpr int64_t kDriveSleepNs = 1'000'000;
    constexpr int64_t kQuietSleepNs = 20'000'000;
    statistics_.wait_ticks +=
        group_->waiter().run(step, *this, links_->leads() ? kDriveSleepNs : kQuietSleepNs);
  }
  template <class Condition>
  void wait_until(Condition&& condition) {
    wait([&] { return condition() ? Step::kDone : Step::kIdle; });
  }

  // --- agreement, in collectives/context/agreement.cpp: all throw on all ranks if ranks differ ---
  bool headers_open();
  void wait_for_headers();  // on one node
  // Returns whether data may be moved now (see Permission), without blocking: pipelines work while
  // they wait.
  Permission permission(const FirstStepFn& first_step = {});
  // Runs the first leader's part of a small collective between nodes: if all headers agree, calls
  // `collect` to gather the cells of this node, exchanges the result together with the headers, and
  // calls `conclude` with the notes of all ranks, if there are any.
  void lead(const std::function<Outgoing()>& collect,
            const std::function<void(const ExchangeNote&)>& conclude = {});
  void wait_for_result();  // waits for the result of lead()

  // Asks all ranks to stop: tells them with the headers of the next collective that this rank
  // opens. May be called from any thread.
  void request_stop() { stop_requested_ = true; }
  // Returns true if a rank had asked before a collective that has run here: the same on all ranks
  // after the same collective. May be called from any thread.
  bool stop_seen() const { return stop_seen_ || (place_.size == 1 && stop_requested_); }

  // Tells the other ranks not to wait for this rank any more. Collectives before `first_missed` are
  // complete.
  void give_up(const Error& error, uint64_t first_missed);
  StatusNote& note() { return note_; }  // state that other processes may read
  // Sets the background thread of hsgd; waits in it never call options.interrupted.
  void set_background_thread(std::thread::id thread) { background_ = thread; }
  // May be called from any thread. While true, a waiting collective ends as if it were interrupted.
  void stop_waiting(bool wanted) { stop_waiting_ = wanted; }
  // May be called from any thread. The waiting collective and all later ones end as if a timeout of
  // `timeout_s` had passed.
  void expire(double timeout_s) { expired_s_ = timeout_s; }

 private:
  std::unique_ptr<LocalGroup> meet_on_node(const std::string& path, Listener* listener,
                                           const Deadline& deadline);
  void tell_other_nodes(const Error& error, uint64_t first_missed);
  void check() override;
  double grace_s() const;
  // Describes the ranks that delay the collective; sets `first` to the first one, or -1 if unknown.
  std::string who_is_late(int* first) const;
  Error expired() const;
  void require_agreement();
  void require_result();
  void see_stop() { stop_seen_ = true; }
  void learn_cost();
  bool headers_agree(Call sides[2]) const;
  [[noreturn]] void fail_mismatch(const Call sides[2]) const;
  void start_headers(const Outgoing& outgoing);
  hsgd_status judge_headers();

  Place place_;
  NodeMap map_;
  hsgd_options options_;
  RoundSchedule rounds_;
  StepSizes sizes_;
  struct Kernels {
    Isa isa;
    CopyFn copy;
  } kernels_;
  StoreTuner stores_;
  StatusNote note_;
  std::unique_ptr<Links> links_;
  // Destroyed before links_, so that the ranks of the node notice at once.
  std::unique_ptr<LocalGroup> group_;
  Statistics statistics_;
  Recorder recorder_;
  Arena arena_;
  bool shares_ = false;
  std::vector<const void*> inputs_;

  struct Current {  // the collective in progress
    uint64_t sequence = 0;
    Signature signature;
    const hsgd_label* label = nullptr;
    int open_seen = 0;  // headers seen of ranks of this node
    bool headers_started = false;
    bool asks_other_nodes = false;  // has asked them which rank is late
    bool node_agrees = false;       // once known; on false the ranks are compared again
  } call_;
  uint64_t first_sequence_ = 0;  // collectives of the set-up, not counted for users
  uint64_t base_ = 0;

  std::atomic<std::thread::id> background_{};
  std::atomic<bool> stop_waiting_{false};
  // Of all three, writers and readers need nothing else in order.
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> stop_seen_{false};
  std::atomic<double> expired_s_{0};  // 0: not expired
  Watch* setup_watch_;
  std::optional<Deadline> deadline_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_CONTEXT_HPP_
