// Streams, each a thread with a queue, and the marks that events are made of.
//
// Owns the threads and the order of work. They are never joined: a process may end while they wait,
// as it may with work on a GPU.
#ifndef SIMCUDA_DRIVER_STREAMS_HPP_
#define SIMCUDA_DRIVER_STREAMS_HPP_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "internal.hpp"

namespace simcuda {

// A point in the work of a stream. Reached in any case: work of a failed context is dropped.
class Mark {
 public:
  void reach();
  bool reached() const;
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> start(Context& context);
  explicit Stream(Context& context) : context_(context) {}

  Context& context() const { return context_; }
  CUstream handle() { return reinterpret_cast<CUstream>(this); }
  std::shared_ptr<Mark> push(Work work);
  // Reached when all work so far is done; nullptr: there was none.
  std::shared_ptr<Mark> last() const;
  void end();  // once the queue is empty

  // Set by a test and read by calls of any thread; nothing else goes by it.
  std::atomic<int> capturing{0};

 private:
  struct Piece {
    Work work;
    std::shared_ptr<Mark> mark;
  };
  void serve();
  bool take(Piece* piece);

  Context& context_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> queue_;
  std::shared_ptr<Mark> last_;
  bool ending_ = false;
};

struct Event {
  Context& context;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // of the latest record; nullptr: none, or nothing to wait for
};

// All streams and events of the process, by handle.
class Streams {
 public:
  std::shared_ptr<Stream> create(Context& context);
  std::shared_ptr<Stream> remove(CUstream handle);
  // `current`: what the default streams belong to. nullptr: an unknown handle.
  std::shared_ptr<Stream> find(CUstream handle, Context& current);
  void synchronize(const Context& context);

  CUevent add_event(Context& context);
  std::shared_ptr<Event> find_event(CUevent handle);
  bool remove_event(CUevent handle);

 private:
  std::mutex mutex_;
  std::map<CUstream, std::shared_ptr<Stream>> created_;
  std::map<Context*, std::shared_ptr<Stream>> legacy_;
  std::map<std::pair<Context*, std::thread::id>, std::shared_ptr<Stream>> per_thread_;
  // Destroyed with work left: a context waits for them too.
  std::vector<std::pair<Context*, std::shared_ptr<Mark>>> leaving_;
  std::map<CUevent, std::shared_ptr<Event>> events_;
};

// Of this process; see faults().
Streams& streams();

// Whether this thread runs a function of cuLaunchHostFunc(), which may not call the driver.
bool& in_host_function();

}  // namespace simcuda

#endif  // SIMCUDA_DRIVER_STREAMS_HPP_
