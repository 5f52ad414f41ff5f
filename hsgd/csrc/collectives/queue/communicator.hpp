// Communicator: runs two-level collectives for their users.
//
// Runs one collective at a time, and keeps the broken state after an error and the order of
// allocations. Independent of Python, torch and MPI. The collectives are in collectives/kinds/,
// their base in collectives/context/.
#ifndef HSGD_COLLECTIVES_QUEUE_COMMUNICATOR_HPP_
#define HSGD_COLLECTIVES_QUEUE_COMMUNICATOR_HPP_

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "collectives/context/context.hpp"
#include "core/base/calls.hpp"
#include "core/base/error.hpp"
#include "core/os/fork_guard.hpp"

namespace hsgd {

class HSGD_API Communicator final {
 public:
  // Connects the ranks of the node; all of them must call it. `path` and `listener` are as in
  // meet(); `transport` is set on leaders only. While this rank waits for others to come, it calls
  // `watch`, if not null, which may end the wait.
  Communicator(const std::string& path, Listener* listener, Place place,
               std::unique_ptr<Transport> transport, const hsgd_options& options,
               Watch* watch = nullptr);
  ~Communicator();

  // Runs a collective and blocks. The kind must be one of collectives/kinds/collectives.hpp, and
  // the arguments must be checked.
  void run(const hsgd_call& call);
  void allreduce(const void* in, void* out, uint64_t count, hsgd_dtype dtype, hsgd_op op,
                 const hsgd_label* label) {
    run(allreduce_call(in, out, count, dtype, op, label));
  }
  void broadcast(void* data, uint64_t count, hsgd_dtype dtype, int root, const hsgd_label* label) {
    run(broadcast_call(data, count, dtype, root, label));
  }
  void barrier() { run(barrier_call()); }
  void reduce_scatter(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                      hsgd_op op, const hsgd_label* label) {
    run(reduce_scatter_call(in, out, counts, dtype, op, label));
  }
  void allgather(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                 const hsgd_label* label) {
    run(allgather_call(in, out, counts, dtype, label));
  }
  void alltoall(const void* in, const uint64_t* send_counts, void* out,
                const uint64_t* receive_counts, hsgd_dtype dtype, const hsgd_label* label) {
    run(alltoall_call(in, send_counts, out, receive_counts, dtype, label));
  }
  // Allocates memory that collectives use without copying; all ranks must call it. In
  // collectives/queue/allocate.cpp. `once_per_node`: one array of `count` elements for all ranks of
  // a node, not one for each.
  std::shared_ptr<SharedBuffer> allocate(uint64_t count, hsgd_dtype dtype, bool once_per_node,
                                         const hsgd_label* label);

  // Returns a communicator of the surviving ranks in the old order; all of them must call it. This
  // one is broken afterwards. On one node only. In collectives/queue/shrink.cpp.
  std::unique_ptr<Communicator> shrink(double timeout_s);

  // Breaks the communicator between two collectives that belong together: tells the other ranks,
  // and throws the error.
  [[noreturn]] void abandon(const Error& error);
  // Sets the reason that the next leave() or destructor in this thread reports.
  void explain_leaving(const std::string& words) { context_.local().explain_leaving(words); }
  // Tells the other ranks, as the destructor would, that this one takes part in no more
  // collectives. Must not be called while one runs.
  void leave();

  // Returns false in a forked child, in which no other member may be called.
  bool is_mine() const { return owner_.is_this_process(); }
  void check_mine() const;  // throws in a forked child
  // Throws if a background thread cannot execute collectives.
  void check_background() const;
  // Throws if only the thread that initialized MPI can.
  void check_threads() const;
  void set_background_thread(std::thread::id thread) { context_.set_background_thread(thread); }
  void stop_waiting(bool wanted) { context_.stop_waiting(wanted); }
  void expire(double timeout_s) { context_.expire(timeout_s); }
  void request_stop() { context_.request_stop(); }
  bool stop_requested() const { return context_.stop_seen(); }
  // Throws PeerLost if a rank of this node has died; for waits outside of collectives.
  void check_alive(int rank, const std::string& what) const;
  // Returns the ranks of this node, for uses outside of collectives.
  const LocalGroup& node() const { return context_.local(); }
  int local_rank_of(int world_rank) const;  // -1: on another node
  int node_of(int world_rank) const;        // -1: no rank of this communicator
  // Publishes the host names of all nodes, separated by commas.
  void tell_hosts(const std::string& names);
  int descriptor() const { return context_.links().descriptor(); }  // see Transport
  const hsgd_options& options() const { return context_.options(); }
  const Place& place() const { return context_.place(); }
  hsgd_topology topology() const;
  hsgd_counters counters() const;
  Recorder& recorder() { return context_.recorder(); }

 private:
  void check_thread() const;
  void run(const Operation& operation);
  void run_guarded(const Operation& operation);
  uint64_t clock_weight(const Operation& operation) const;
  // `is_first`: true if this is the first rank of this node to give up.
  void give_up(const Error& error, uint64_t first_missed, bool is_first = false);

  std::shared_ptr<SharedBuffer> share(uint64_t id, size_t bytes, size_t available,
                                      const char* what);
  template <class Body>
  void attempt_on_all(const char* what, Body&& body);

  Owner owner_;
  Context context_;
  mutable std::mutex mutex_;  // one collective at a time
  std::optional<Error> broken_;
  std::mutex allocating_;  // taken before mutex_
  uint64_t allocations_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_COMMUNICATOR_HPP_
