// The thread that carries out collectives on host memory between two copies of a device.
//
// Owns the order, that of the calls. The device sets a signal when it has copied the input down,
// or, in another stream, when it has passed a mark; the thread sets one when the result may be
// copied up. Each is set in one stream or thread only, so that it never goes back. It never calls
// the driver. After an error every result is filled with ones, which are NaN in floating dtypes, so
// that nobody takes for a result what is none, and the device goes on.
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

// What may have the device wait for other ranks, and so for ever.
class DeviceGuard {
 public:
  virtual ~DeviceGuard() = default;
  // Called now and then while something is waited for that the device does in a call over this, and
  // for how long it has been. Throws where it never will be done.
  virtual void look(int64_t waited_ns) = 0;
  // Once, after the first failure: the device waits for no rank from now on.
  virtual void release() noexcept = 0;
  // What is queued may hang for ever, and is left behind.
  virtual void leave_behind() noexcept = 0;
};

// A communicator that the thread uses, and nobody else until that is gone.
struct HostRanks {
  hsgd_comm* comm = nullptr;
  std::vector<int> numbers;  // of its ranks, in the communicator of the device's collectives
};

// What the thread does for one number of the signals.
struct HostTask {
  enum class Kind {
    kExchange,  // waits for the device, then runs the collective
    kAgree,     // runs the collective, which moves nothing, then waits for the device
    kAwait,     // waits for the device
  };
  Kind kind = Kind::kExchange;
  uint32_t number = 0;
  bool is_guarded = false;    // see DeviceGuard
  hsgd_comm* comm = nullptr;  // over which ranks
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
  // `guard`: may be nullptr.
  ExchangeThread(const Signals& signals, std::vector<HostRanks> ranks, DeviceGuard* guard);
  ~ExchangeThread() { finish(); }
  ExchangeThread(const ExchangeThread&) = delete;
  ExchangeThread& operator=(const ExchangeThread&) = delete;

  // Local, never blocks. Numbers grow by one, in a circle.
  void submit(HostTask task);
  // Local. Whether it has failed, and what with; from then on every collective does.
  bool has_failed(hsgd_error* err) const;
  // Local. Has everything fail that is not done, here and, since this rank leaves, on the others.
  void fail(const hsgd_error& error);
  // Local. Signals of the device will not come any more: nothing waits for them from now on.
  void give_device_up() { device_is_lost_.store(true, std::memory_order_release); }
  // False where something that was submitted is not done after so long.
  bool wait_until_idle(double timeout_s);
  // Blocks until all that was submitted is done, and ends the thread. A second call does nothing.
  void finish();

 private:
  void serve();
  bool await_device(const HostTask& task);
  void execute(HostTask& task);
  void look(int64_t waited_ns);
  void note(const hsgd_error& error);
  void note_of(const hsgd_comm* comm, hsgd_error error);
  bool tell_if_failed(std::unique_lock<std::mutex>& lock);
  void tell_others(const hsgd_error& error);

  const Signals signals_;
  const std::vector<HostRanks> ranks_;
  DeviceGuard* guard_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::deque<HostTask> queue_;
  std::optional<hsgd_error> failure_;  // the first one
  bool has_told_ = false;              // the other ranks of it
  bool executes_ = false;
  bool ends_ = false;
  std::atomic<bool> device_is_lost_{false};
  std::thread thread_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_EXCHANGE_THREAD_HPP_
