// What collectives are built from: the ranks of the node, the links between nodes, and one
// collective at a time.
//
// Owns the sequence of collectives, the comparison of their signatures, waiting with its deadline,
// and the buffers that all ranks of the node can reach. Knows no collective: those are functions
// that are given a context. The communicator runs one collective at a time, and none after an
// error.
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

// Whether data may move. kOnNode: the headers of this node agree, so that its first step may be
// reduced, and sent beside the headers, but no output be touched. kGranted: all agree.
enum class Permission { kUnknown, kOnNode, kGranted };

// What the first leader tells the other nodes together with the headers.
struct Outgoing {
  Payload payload;
  MergeFn merge;                // none: nobody has a payload
  std::byte* result = nullptr;  // where the payloads of all nodes go, merged
  ExchangeNote note;
  RoundPayload* first_step = nullptr;  // of a pipeline, in the place of a payload
};

// The first step of a pipeline on the first leader, once it may travel with the headers; nullptr:
// that goes without headers, after them.
using FirstStepFn = std::function<std::optional<RoundPayload*>()>;

class Context final : private Watch {
 public:
  // Collective over the node; `path` and `listener` as in meet(). `transport` on leaders only.
  // `watch`, if any, is looked at while this rank waits, until end_setup().
  Context(const std::string& path, Listener* listener, Place place,
          std::unique_ptr<Transport> transport, const hsgd_options& options, Watch* watch);
  ~Context() override;
  // Users count their collectives, and all else, from here on: those of the set-up are
  // `collectives`, on all nodes the same number.
  void end_setup(uint64_t collectives);

  // --- who takes part, and how ---
  const Place& place() const { return place_; }
  bool one_node() const { return place_.node_count == 1; }
  const NodeMap& map() const { return map_; }
  const RoundSchedule& rounds() const { return rounds_; }
  int local_rank_of(int world_rank) const;  // -1: on another node
  int node_of(int world_rank) const;        // -1: no rank of this communicator
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
  // Whether buffers were ever allocated; changes in the same collective on all ranks.
  bool shares() const { return shares_; }
  void set_shares() { shares_ = true; }
  std::vector<const void*>& inputs() { return inputs_; }  // one for each node or rank of the node

  // --- one collective, which this rank begins, opens and then finishes ---
  void begin(const Signature& signature, const hsgd_label* label);
  void restart_deadline() { deadline_.reset(); }
  void forget_label() { call_.label = nullptr; }  // the caller's
  uint64_t sequence() const { return call_.sequence; }
  uint64_t user_sequence() const { return call_.sequence - first_sequence_; }
  uint64_t base() const { return base_; }  // pipeline steps so far
  std::string what() const;                // for messages
  // Publishes the header, and `bytes` of payload beside it. `combine`: called by one rank, once all
  // ranks of the node have opened it alike and before any is told, where local().combines().
  void open(const Operation& operation, const void* payload, size_t bytes,
            const std::function<void()>& combine = nullptr);
  bool is_open() const { return group_->is_open(place_.local_rank, call_.sequence); }
  // This rank needs nothing any more of so many steps, whatever part it had in them.
  void finish_steps(uint64_t steps);
  // Has the next `steps` be skipped: what somebody staged for a refused collective is then never
  // mistaken for a step of a later one.
  void skip_steps();

  // Calls `step`, which must not block, until it says kDone. Throws when that is not to be hoped
  // for any more.
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

  // --- agreement: in collectives/context/agreement.cpp. All throw when ranks differ, on all ranks
  // alike ---
  bool headers_open();
  void wait_for_headers();  // on one node
  // For pipelines, which have more to do than to wait.
  Permission permission(const FirstStepFn& first_step = {});
  // The part of the first leader in a small collective between nodes: `collect` what the ranks here
  // have put into their cells, when all headers agree, exchange it together with the headers, and
  // `conclude` from the notes of all ranks, where there are any.
  void lead(const std::function<Outgoing()>& collect,
            const std::function<void(const ExchangeNote&)>& conclude = {});
  void wait_for_result();  // of lead()

  // --- others ---
  // Nobody waits for this rank from now on; a collective before `first_missed` misses nothing.
  void give_up(const Error& error, uint64_t first_missed);
  StatusNote& note() { return note_; }  // what other processes may read of this rank
  // A thread of hsgd's own: waiting in it never calls options.interrupted.
  void set_background_thread(std::thread::id thread) { background_ = thread; }
  // From any thread: while true, a collective that waits ends as if it were interrupted.
  void stop_waiting(bool wanted) { stop_waiting_ = wanted; }
  // From any thread: the collective that waits, and all later ones, end as if they had had so many
  // seconds, which have passed.
  void expire(double timeout_s) { expired_s_ = timeout_s; }

 private:
  std::unique_ptr<LocalGroup> meet_on_node(const std::string& path, Listener* listener,
                                           const Deadline& deadline);
  void tell_other_nodes(const Error& error, uint64_t first_missed);
  void check() override;
  double grace_s() const;
  // Who holds the collective up, and the first such rank; -1: not known.
  std::string who_is_late(int* first) const;
  Error expired() const;
  void require_agreement();
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
  std::unique_ptr<LocalGroup> group_;  // goes first: the ranks of the node learn of it at once
  Statistics statistics_;
  Recorder recorder_;
  Arena arena_;
  bool shares_ = false;
  std::vector<const void*> inputs_;

  struct Current {  // under way
    uint64_t sequence = 0;
    Signature signature;
    const hsgd_label* label = nullptr;
    int open_seen = 0;  // headers of ranks of this node
    bool headers_started = false;
    bool asks_other_nodes = false;  // who holds it up
    bool node_agrees = false;       // once known; a rank that differs is looked for again
  } call_;
  uint64_t first_sequence_ = 0;  // collectives of the set-up, which users do not count
  uint64_t base_ = 0;

  std::atomic<std::thread::id> background_{};
  std::atomic<bool> stop_waiting_{false};
  std::atomic<double> expired_s_{0};  // 0: not
  Watch* setup_watch_;
  std::optional<Deadline> deadline_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_CONTEXT_HPP_
