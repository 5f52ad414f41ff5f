// Turn: threads that may call MPI do so one at a time if MPI needs that.
//
// This applies to MPI_THREAD_SERIALIZED and below; under MPI_THREAD_MULTIPLE it costs nothing. The
// program must order its own MPI calls: between nodes a call of hsgd counts as one of MPI's. Calls
// PMPI_* only.
#ifndef HSGD_NETWORK_MPI_THREADS_HPP_
#define HSGD_NETWORK_MPI_THREADS_HPP_

#include <mutex>

namespace hsgd {

inline constexpr const char* kForeignThread =
    "MPI was initialized for MPI_THREAD_FUNNELED or less, so only the thread that initialized it "
    "may call it; call from there, or ask MPI_Init_thread for MPI_THREAD_MULTIPLE (mpi4py: "
    "mpi4py.rc.thread_level = 'multiple' before the import of MPI)";

// Returns the thread level of this process's MPI: MPI_THREAD_SINGLE to MPI_THREAD_MULTIPLE.
int thread_level();

// Returns true if only the thread that initialized MPI may call it, and this is another thread.
bool is_foreign_thread();

// A lock that keeps other threads out of MPI, if MPI needs that. It is held during short calls and
// released while a call waits.
class Turn {
 public:
  explicit Turn(bool needed);

  // Runs `body` without the turn, because it waits or takes turns itself.
  template <class Body>
  void leave_for(Body&& body) {
    const bool held = lock_.owns_lock();
    struct Back {
      std::unique_lock<std::mutex>& lock;
      bool held;
      ~Back() {
        if (held) lock.lock();
      }
    } back{lock_, held};
    if (held) lock_.unlock();
    body();
  }

  // Runs `body` with the turn, inside leave_for().
  template <class Body>
  void take_for(Body&& body) {
    if (lock_.mutex() == nullptr) return body();
    const std::lock_guard<std::mutex> back(*lock_.mutex());
    body();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_THREADS_HPP_
