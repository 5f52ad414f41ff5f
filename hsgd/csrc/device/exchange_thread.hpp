// ExchangeThread: a thread that runs collectives on host memory between two copies of a device.
//
// Runs them in the order of the calls. The device sets a signal after it has copied the input down,
// or, in another stream, after it has passed a mark; the thread sets a signal when the result may
// be copied up. Each signal is set by one stream or thread only, so that it never decreases. The
// thread never calls the driver. After an error every result is filled with ones, which are NaN in
// floating dtypes, so that it cannot be mistaken for a valid result, and the device continues.
#ifndef HSGD_DEVICE_EXCHANGE_THREAD_HPP_
#define HSGD_DEVICE_EXCHANGE_THREAD_HPP_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/device_resources.hpp"
#include "hsgd_core.h"

namespace hsgd {

// The guard of device work that waits for other ranks, possibly forever.
class DeviceGuard {
 public:
  virtual ~DeviceGuard() = default;
  // Checks the guarded call; called from time to time while the device works on it, with the time
  // of the wait so far. Throws if it will never be done.
  virtual void look(int64_t waited_ns) = 0;
  // Called once, after the first failure: makes the device stop waiting for other ranks.
  virtual void release() noexcept = 0;
  // Leaves the queued work behind, because it may hang forever.
  virtual void leave_behind() noexcept = 0;
};

// The task of the thread for one number of the signals.
struct HostTask {
  enum class Kind {
    kExchange,  // waits for the device, then runs the collective
    kAgree,     // runs the collective, which moves nothing, then waits for the device
    kAwait,     // waits for the device
  };
  Kind kind = Kind::kExchange;
  uint32_t number = 0;
  bool is_guarded = false;    // see DeviceGuard
  hsgd_comm* comm = nullptr;  // the communicator that runs it
  hsgd_call call{};
  std::vector<uint64_t> counts;
  std::vector<uint64_t> receive_counts;
  std::shared_ptr<const std::string> name;  // or nullptr
  std::vector<int64_t> shape;               // compared between ranks
  std::byte* result = nullptr;
  size_t result_bytes = 0;
};

class HSGD_API ExchangeThread {
 public:
  struct Signals {
    Signal& has_copied;  // of exchanges
    Signal& has_passed;  // of the other kinds
    Signal& may_copy;
  };
  // `comms`: communicators that only the thread uses while it runs; their errors call each rank
  // alike. `guard`: may be nullptr.
  ExchangeThread(const Signals& signals, std::vector<hsgd_comm*> comms, DeviceGuard* guard);
  ~ExchangeThread() { finish(); }
  ExchangeThread(const ExchangeThread&) = delete;
  ExchangeThread& operator=(const ExchangeThread&) = delete;

  // Queues a task. Local, never blocks. `task.number` is one more, modulo 2^32, than that of the
  // last task with the same signal.
  void submit(HostTask task);
  // Returns true and the error if the thread has failed; from then on every collective fails.
  // Local.
  bool has_failed(hsgd_error* err) const;
  // Makes all unfinished work fail, here and, because this rank leaves, on the other ranks. Local.
  void fail(const hsgd_error& error);
  // Stops all waits for the device, whose signals will not come any more. Local.
  void give_device_up() { device_is_lost_.store(true, std::memory_order_release); }
  // Returns false if submitted work is not done after `timeout_s`.
  bool wait_until_idle(double timeout_s);
  // Blocks until all submitted work is done, and ends the thread. A second call does nothing.
  void finish();

 private:
  void serve();
  bool await_device(const HostTask& task);
  void execute(HostTask& task);
  void look(int64_t waited_ns);
  void note(const hsgd_error& error);
  bool tell_if_failed(std::unique_lock<std::mutex>& lock);
  void tell_others(const hsgd_error& error);

  const Signals signals_;
  const std::vector<hsgd_comm*> comms_;
  DeviceGuard* guard_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::deque<HostTask> queue_;
  std::optional<hsgd_error> failure_;  // the first one
  bool has_told_ = false;              // has reported the failure to the other ranks
  bool executes_ = false;
  bool ends_ = false;
  std::atomic<bool> device_is_lost_{false};
  std::thread thread_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_EXCHANGE_THREAD_HPP_
