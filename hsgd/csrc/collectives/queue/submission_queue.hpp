// Submissions: executes submitted collectives and functions later, in the order of submission.
//
// Owns the queue of one communicator and the thread that executes it (started by the first
// submission, asleep while the queue is empty). Each request owns copies of its label and counts,
// and its outcome. A caller that waits without a time limit executes the next request itself if the
// thread has not begun it; a function only if it waits for that one. Never touches a caller's
// buffers once a request is done, never calls hsgd_options.interrupted in its own thread, and does
// nothing in a forked child.
#ifndef HSGD_COLLECTIVES_QUEUE_SUBMISSION_QUEUE_HPP_
#define HSGD_COLLECTIVES_QUEUE_SUBMISSION_QUEUE_HPP_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "core/os/fork_guard.hpp"
#include "hsgd_core.h"

namespace hsgd {

// One submitted collective or function.
class Request {
 public:
  // Copies everything `call` points to, except the buffers. `size`: number of ranks, the length of
  // counts.
  Request(const hsgd_call& call, int size);
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  const hsgd_call& call() const { return call_; }
  // Returns true if the request is done; a reader of true also sees the outcome and the result in
  // the caller's buffer. Partner: finish().
  bool done() const { return done_.load(std::memory_order_acquire); }
  void finish() { done_.store(true, std::memory_order_release); }
  // Written by the executing thread before finish(); read by others once it is done.
  hsgd_error& outcome() { return outcome_; }
  const hsgd_error& outcome() const { return outcome_; }

 private:
  hsgd_call call_;
  hsgd_label label_{};
  std::string name_;
  std::vector<int64_t> shape_;
  std::vector<uint64_t> counts_;
  std::vector<uint64_t> receive_counts_;
  hsgd_error outcome_;
  std::atomic<bool> done_{false};
};

class Submissions : public std::enable_shared_from_this<Submissions> {
 public:
  using Execute = void (*)(Communicator&, const hsgd_call&);  // blocks; throws Error

  // The communicator must live until close() has returned.
  Submissions(Communicator& communicator, Execute execute);
  Submissions(const Submissions&) = delete;
  Submissions& operator=(const Submissions&) = delete;

  // Queues a call; never blocks. Throws if the communicator cannot be used by another thread.
  std::shared_ptr<Request> submit(const hsgd_call& call);
  // Executes a function in its turn, and blocks; starts no thread. Throws if interrupted.
  void run_function(const hsgd_call& call);
  // Waits until all earlier submissions are done, with or without an error. Every blocking
  // collective calls it first; it costs one load if nothing is open. Partner: execute_next().
  void keep_order() {
    if (open_.load(std::memory_order_acquire) != 0) drain();
  }
  // Waits for one request and returns its outcome; returns HSGD_ERR_PENDING after `timeout_s`, if
  // that is not negative. An interrupted wait breaks the communicator, as an interrupted collective
  // does.
  int wait(const Request& request, double timeout_s, hsgd_error* err);
  // Finishes all open requests and ends the thread. A function may call it, too: the thread ends
  // after that function.
  void close();
  // If this thread executes a collective, whose signal handlers may run anything: calls `then`
  // after that collective, and returns true.
  bool after_collective(std::function<void()> then);
  bool is_mine() const { return owner_.is_this_process(); }

 private:
  enum class Waited { kDone, kTimeout, kInterrupted };
  using Lock = std::unique_lock<std::mutex>;

  using Queue = std::list<std::shared_ptr<Request>>;  // allocates nothing while it is empty
  // A request in execution, and what its function has submitted, which comes next. Functions that
  // wait in a function are executed within it.
  struct Turn {
    Turn* outer;
    bool is_function;
    Queue inner;
  };

  std::shared_ptr<Request> push(const hsgd_call& call, bool needs_thread);
  void drain();
  void start_thread();
  void work();
  void execute(Lock& lock, Queue& queue);
  void execute_next(Lock& lock);
  bool is_executor() const { return executor_ == std::this_thread::get_id(); }
  bool is_in_function() const { return is_executor() && turn_ != nullptr && turn_->is_function; }
  void check_no_handler() const;
  bool execute_within(Lock& lock);
  template <class Finished>
  Waited wait_until(Lock& lock, double timeout_s, const Request* awaited, Finished&& finished);
  bool take_interrupt(Lock& lock) const;

  Owner owner_;
  std::atomic<uint64_t> open_{0};

  std::mutex mutex_;                  // guards everything below
  std::condition_variable work_;      // the thread waits: something to execute, or the end
  std::condition_variable finished_;  // others wait: a request is done
  Communicator* communicator_;        // nullptr once closed
  Execute execute_;
  Queue queue_;
  Queue next_;                // submitted by the function that was executed last
  bool executing_ = false;    // a thread executes; one request at a time, in order
  std::thread::id executor_;  // that thread
  Turn* turn_ = nullptr;
  bool executes_function_ = false;
  bool interrupted_ = false;    // what the executor has executed since it was last asked
  uint64_t borrowed_ = 0;       // requests of the queue that were executed within a function
  std::function<void()> then_;  // see after_collective()
  uint64_t submitted_count_;
  uint64_t finished_count_;
  std::thread thread_;
};

}  // namespace hsgd

// The request handle of the C interface. May outlive the communicator.
struct hsgd_request {
  std::shared_ptr<hsgd::Submissions> submissions;
  std::shared_ptr<hsgd::Request> request;
};

#endif  // HSGD_COLLECTIVES_QUEUE_SUBMISSION_QUEUE_HPP_
