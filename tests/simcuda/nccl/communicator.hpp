// One rank of a communicator: its memory, the turns of its operations, and its end.
//
// Owns what an abort needs: it ends operations that wait for peers which never come. Peers notice
// nothing, as with NCCL.
#ifndef SIMCUDA_NCCL_COMMUNICATOR_HPP_
#define SIMCUDA_NCCL_COMMUNICATOR_HPP_

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "../driver/internal.hpp"
#include "channels.hpp"
#include "nccl_types.hpp"

namespace simnccl {

class Communicator {
 public:
  Communicator(simcuda::Context& context, int rank, int size, int fd);
  ~Communicator();
  simcuda::Context& context() const { return context_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Region& region() const { return region_; }
  ncclComm_t handle() { return reinterpret_cast<ncclComm_t>(this); }

  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Whether an operation that waits must give up.
  bool stopped() const { return aborted() || context_.failed(); }
  // Returns when no operation touches memory any more.
  void abort();
  // Returns when all operations are done, which may be never.
  void drain();

  std::atomic<int> async_error{ncclSuccess};

 private:
  friend class Turn;
  simcuda::Context& context_;
  const int rank_;
  const int size_;
  const Region region_;
  // Set by abort(), read by operations: nothing else is published by it.
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<uint64_t> turns_;  // taken and not given back
  uint64_t next_turn_ = 0;
  int running_ = 0;
};

// The place of a launch among those of its communicator: they run in this order, whatever their
// streams. Given back when the work is gone, run or not.
class Turn {
 public:
  explicit Turn(std::shared_ptr<Communicator> comm);
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn();
  // Waits for the turns before. False: the communicator was stopped; nothing may be done.
  bool begin();
  void end();

 private:
  const std::shared_ptr<Communicator> comm_;
  uint64_t number_;
};

// The communicators of this process, by handle.
class Communicators {
 public:
  void add(const std::shared_ptr<Communicator>& comm);
  std::shared_ptr<Communicator> find(ncclComm_t handle);  // nullptr: there is none
  void remove(ncclComm_t handle);
  int live();

 private:
  std::mutex mutex_;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> live_;
};

// Made at the first use and never destroyed: streams outlive main().
Communicators& communicators();

}  // namespace simnccl

#endif  // SIMCUDA_NCCL_COMMUNICATOR_HPP_
