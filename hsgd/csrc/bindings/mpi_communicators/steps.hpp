// The steps in which ranks set a communicator up over MPI. None waits without end.
//
// Owns the waits: a step ends when its time is over, when MPI knows that a rank has died, or when
// the program was interrupted. So it takes what MPI has in a nonblocking form only, and between two
// looks it sleeps. A step that is given up stays under way, with what MPI reads and writes for it,
// until the process ends. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/error.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/mpi/handle.hpp"
#include "network/mpi/threads.hpp"

namespace hsgd {

// All but what only one rank does is collective over the communicator. `what` completes the
// sentence "not all of 4 ranks ...". Throw HSGD_ERR_TIMEOUT, HSGD_ERR_PEER_LOST with the rank where
// MPI knows it, HSGD_ERR_INTERRUPTED, HSGD_ERR_SYSTEM.
class Steps {
 public:
  // `turn`: the caller's, which is left while a step waits. Must outlive this.
  Steps(MPI_Comm comm, const hsgd_options& options, Turn& turn);

  int rank() const { return rank_; }
  int size() const { return size_; }
  Turn& turn() const { return turn_; }

  // For steps that may be in vain: as long at most, and nobody is asked to wait on.
  Steps within(double limit_s) const;

  // The first step on a communicator that is the program's. It cannot be mistaken for a collective
  // of the program where a rank makes that instead, and while it waits, MPI goes on, which others
  // may wait for.
  void come();
  // A communicator with the same ranks. MPI calls the copy functions of the program's attributes.
  OwnComm duplicate();

  // On a communicator of our own, by messages: libraries' nonblocking collectives may be linear in
  // the number of ranks (Open MPI's MPI_Iallgather), or write lines of their own when a rank dies.
  void broadcast(void* data, size_t bytes, int root, const char* what);
  uint64_t greatest(uint64_t own, const char* what);
  // Every rank's row of `bytes`, by rank.
  void gather(const void* row, void* rows, size_t bytes, const char* what);
  // The same among some ranks, which alone call it, by their order in `members`.
  void gather_among(const std::vector<int>& members, const void* row, void* rows, size_t bytes,
                    const char* what);

  // Local: throws where MPI knows of a rank that died.
  void check_deaths(const char* what) const;

 private:
  struct UnderWay;
  using Step = std::unique_ptr<UnderWay>;
  struct Message {
    void* data;
    size_t bytes;
    int rank;  // of the other side, or that and a multiple of the size
  };

  void receive(Step& step, const Message& from);
  void send(Step& step, const Message& to);
  void finish(Step& step, const char* what);
  void wait(UnderWay& step, const char* what);
  void look_around(const Deadline& deadline, const char* what) const;
  void say_late(const char* what) const;

  MPI_Comm comm_;
  hsgd_options options_;
  Turn& turn_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_
