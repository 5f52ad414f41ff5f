// Two-level collectives: what a communicator does with the ranks of its node and with the other
// nodes.
//
// Owns the sequence of collectives, the choice between the regimes (one-shot up to oneshot_bytes,
// chunk pipeline above), the comparison of signatures, deadlines and the broken state after an
// error. Never knows Python, torch or MPI. Collectives whose ranks have different parts are in
// collectives/communicator_blocks.cpp.
#ifndef HSGD_COLLECTIVES_COMMUNICATOR_HPP_
#define HSGD_COLLECTIVES_COMMUNICATOR_HPP_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "collectives/pipeline.hpp"
#include "collectives/store_tuner.hpp"
#include "collectives/trace.hpp"
#include "collectives/tuning.hpp"
#include "internode/rank_blocks.hpp"
#include "internode/step_messages.hpp"
#include "internode/transport.hpp"
#include "internode/wire.hpp"
#include "kernels/reduce.hpp"
#include "node/node_group.hpp"
#include "node/symmetric_memory.hpp"
#include "os/fork_guard.hpp"

namespace hsgd {

class AlltoallShape;
struct SharedArguments;

// Where a rank stands; the same picture on all ranks but for the rank's own place.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  int node_rank = 0, node_count = 1;
  int leaders = 0;                // 0 on one node
  std::vector<int> node_of_rank;  // by world rank; empty on one node
  std::string one_thread;         // why the transport serves one thread only; empty: it does not
  // Whether the caller's thread may not use the transport, and why; nullptr: any may.
  bool (*is_foreign_thread)() = nullptr;
  std::string why_foreign;
};

class HSGD_API Communicator final : private Watch {
 public:
  // Collective over the node; `path` and `listener` as in meet(). `transport` on leaders only.
  // `watch`, if any, is looked at while this rank waits for others to come, and may end that.
  Communicator(const std::string& path, Listener* listener, Place place,
               std::unique_ptr<Transport> transport, const hsgd_options& options,
               Watch* watch = nullptr);
  ~Communicator() override;

  void allreduce(const void* in, void* out, uint64_t count, hsgd_dtype dtype, hsgd_op op,
                 const hsgd_label* label);
  void broadcast(void* data, uint64_t count, hsgd_dtype dtype, int root, const hsgd_label* label);
  void barrier();
  // Collective: memory that collectives use where it lies.
  // `once_per_node`: one array of `count` elements for all ranks of a node, not one for each.
  std::shared_ptr<SharedBuffer> allocate(uint64_t count, hsgd_dtype dtype, bool once_per_node,
                                         const hsgd_label* label);
  // `counts`: of the block of each rank, the same on all ranks.
  void reduce_scatter(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                      hsgd_op op, const hsgd_label* label);
  void allgather(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                 const hsgd_label* label);
  // Counts to and from each rank; the other ranks know theirs.
  void alltoall(const void* in, const uint64_t* send_counts, void* out,
                const uint64_t* receive_counts, hsgd_dtype dtype, const hsgd_label* label);

  // A communicator of the ranks that are left, in the old order; collective over them. This one is
  // broken afterwards. On one node only. In collectives/shrink.cpp.
  std::unique_ptr<Communicator> shrink(double timeout_s);

  // Between two collectives that belong together: breaks the communicator, tells the other ranks,
  // and throws the error.
  [[noreturn]] void abandon(const Error& error);
  // Tells the other ranks, as the destructor would, that this one takes part in no more
  // collectives. Not while one runs.
  void leave();

  // False in a forked child, where nothing may be called but this.
  bool is_mine() const { return owner_.is_this_process(); }
  // Throws where a thread of hsgd's own cannot execute collectives.
  void check_background() const;
  // A thread of hsgd's own: waiting in it never calls options.interrupted.
  void set_background_thread(std::thread::id thread) { background_ = thread; }
  // From any thread: while true, a collective that waits ends as if it were interrupted.
  void stop_waiting(bool wanted) { stop_waiting_ = wanted; }
  // Throws PeerLost when a rank of this node has died, for waits outside of collectives.
  void check_alive(int rank, const std::string& what) const;
  // The ranks of this node, for what is built beside collectives.
  const LocalGroup& node() const { return local_; }
  int local_rank_of(int world_rank) const;  // -1: on another node
  int node_of(int world_rank) const;        // -1: no rank of this communicator
  const hsgd_options& options() const { return options_; }
  hsgd_topology topology() const;
  hsgd_counters counters() const;
  Recorder& recorder() { return recorder_; }

 private:
  struct Operation {
    Signature signature;
    const hsgd_label* label = nullptr;
    const void* in = nullptr;
    void* out = nullptr;
    uint64_t count = 0;
    Reduction reduction;
    int root = -1;              // broadcast: world rank
    Range part{0, UINT64_MAX};  // what of the result of a reduction this rank wants
    Counts counts;              // reduce_scatter, allgather: the blocks; alltoall: sent
    const uint64_t* receive_counts = nullptr;  // alltoall
    Range wanted() const { return {part.begin, std::min(part.end, count)}; }
    size_t bytes() const { return count * reduction.element_bytes; }
    size_t out_bytes() const;  // that this rank writes
  };
  // How a payload travels between nodes.
  struct WirePlan {
    int leaders;  // local ranks that carry it; 0 on one node
    size_t step_bytes;
  };

  // What local rank 0 tells the other nodes together with the headers.
  struct Outgoing {
    const void* payload = nullptr;
    size_t bytes = 0;
    ExchangeNote note;
  };

  void check_mine() const;
  void check_thread() const;
  void run(Operation& operation);
  uint64_t clock_weight(const Operation& operation) const;
  void begin_collective(const Signature& signature);
  void open(const Operation& operation, const void* payload, size_t bytes);
  void wait_for_headers();
  void wait_for_result();
  void lead(const std::function<Outgoing()>& collect, const std::function<void()>& combine);
  void give_up(const Error& error, uint64_t first_missed);
  const Parting* who_parted();
  void run_locally(const Operation& operation);
  void small_on_node(const Operation& operation);
  void small_between_nodes(const Operation& operation);
  void lead_small(const Operation& operation);
  Narrowing narrowing_of(hsgd_dtype dtype, hsgd_op op) const;
  WirePlan wire_plan(size_t bytes) const;
  size_t broadcast_step_bytes() const;
  SliceExchange* started_wire(const WirePlan& plan, const Operation& operation);
  void large_allreduce(const Operation& operation);
  std::optional<SharedArguments> shared_arguments(const Operation& operation, size_t in_bytes,
                                                  size_t out_bytes);
  bool allreduce_in_place(const Operation& operation);
  bool broadcast_in_place(const Operation& operation);
  void run_directly(const Operation& operation,
                    const std::function<void(const PipelineContext&)>& work);
  void open_large(const Operation& operation, const ArenaPlace places[2]);
  void large_broadcast(const Operation& operation);
  void run_pipeline(Pipeline& pipeline, const Operation& operation, uint64_t steps);
  Store out_store(const Operation& operation) const;
  PipelineContext pipeline_context(int leaders, const Operation& operation);
  PipelineContext staged_context(int leaders, const Operation& operation);

  // In collectives/communicator_blocks.cpp: collectives whose ranks have different parts.
  void run_on_blocks(const Operation& operation);
  void run_reduce_scatter(const Operation& operation);
  bool reduce_scatter_in_place(const Operation& operation);
  Operation allgather_of(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                         const hsgd_label* label) const;
  void run_allgather(const Operation& operation);
  bool allgather_in_place(const Operation& operation);
  void small_allgather_on_node(const Operation& operation);
  void small_allgather_between_nodes(const Operation& operation);
  void run_alltoall(const Operation& operation);
  std::shared_ptr<SharedBuffer> tell_places_of(const Operation& operation);
  size_t packet_bytes() const;
  ExchangeNote note_of(const Operation& operation, const AlltoallShape& shape) const;
  void fill_packet(const Operation& operation);
  ExchangeNote notes_here() const;
  ExchangeNote notes_on_node();
  ExchangeNote notes_between_nodes();
  void take_packets(const Operation& operation);
  [[noreturn]] void fail_imbalance(const Operation& operation);

  bool headers_open();
  bool headers_agree(Call sides[2]) const;
  void require_agreement();
  void learn_cost();
  [[noreturn]] void fail_mismatch(const Call sides[2]) const;
  Permission permission();
  void start_headers(Outgoing outgoing);
  hsgd_status judge_headers(Call sides[2]) const;
  void finish_steps(uint64_t steps);
  void reduce_payloads(const Operation& operation, const Range& part, void* out, double divisor);

  void share(SharedBuffer& buffer, bool in_a_row);
  template <class Body>
  void attempt_on_all(const char* what, Body&& body);
  // MPI makes progress only when it is called.
  static constexpr int64_t kDriveSleepNs = 1'000'000;
  static constexpr int64_t kQuietSleepNs = 20'000'000;
  template <class StepFunction>
  void wait(StepFunction&& step) {
    const int64_t longest_ns = transport_ != nullptr ? kDriveSleepNs : kQuietSleepNs;
    wait_ticks_ += local_.waiter().run(step, *this, longest_ns);
  }
  void check() override;
  void agree_on_node(double* values, uint64_t count, hsgd_op op);
  void tune();
  std::vector<double> measure(size_t bytes, const std::vector<Tuning>& tunings);
  void pipeline_on_node(const Operation& operation);
  size_t node_step_bytes() const;
  size_t step_bytes() const;
  size_t block_step_bytes() const;
  void meet_on_node();
  std::string what() const;

  Owner owner_;
  Place place_;
  NodeMap map_;
  hsgd_options options_;
  size_t chunk_bytes_;  // of one pipeline step, with all leaders
  Isa isa_;
  CopyFn copy_;
  Tuning tuning_;
  StoreChoices stores_;
  // What the next header tells: the last collective whose cost is compared, on all ranks the same.
  struct Compared {
    StoreChoice* choice = nullptr;
    size_t bytes = 0;
    uint64_t ticks = 0;  // that this rank worked
  };
  Compared compared_;
  Compared staged_;  // this collective, if its cost will be compared
  WireCounters wire_counters_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<LocalGroup> group_;
  LocalGroup& local_;                        // *group_
  std::unique_ptr<HeaderExchange> headers_;  // local rank 0 of several nodes
  std::unique_ptr<SliceExchange> slices_;    // leaders
  std::unique_ptr<TreeBroadcast> tree_;      // local rank 0 of several nodes
  std::unique_ptr<StepMessages> messages_;   // leaders

  std::atomic<std::thread::id> background_{};
  std::atomic<bool> stop_waiting_{false};
  mutable std::mutex mutex_;  // one collective at a time; also guards everything below
  TickClock clock_;
  Recorder recorder_;
  hsgd_counters counters_{};
  uint64_t total_ticks_ = 0;
  uint64_t wait_ticks_ = 0;
  uint64_t sequence_ = 0;
  uint64_t first_sequence_ =
      0;               // collectives of the start-up measurement, which users do not count
  uint64_t base_ = 0;  // pipeline steps so far
  int open_seen_ = 0;
  bool headers_started_ = false;
  Signature current_;
  const hsgd_label* label_ = nullptr;  // of the operation that runs
  Watch* setup_watch_;                 // while the set-up lasts
  std::optional<Deadline> deadline_;
  std::optional<Parting> parting_;  // leaders: of the nodes that parted, the one that misses most
  std::string broken_;
  std::vector<const void*> inputs_;
  Arena arena_;
  bool shares_ = false;  // buffers were allocated; changes in the same collective on all ranks

  std::mutex allocating_;  // taken before mutex_
  uint64_t allocations_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_COMMUNICATOR_HPP_
