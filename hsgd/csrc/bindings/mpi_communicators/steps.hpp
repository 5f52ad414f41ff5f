// Steps: runs the steps in which ranks set up a communicator over MPI. None waits forever.
//
// A step ends at its deadline, when MPI knows that a rank has died, or when the program was
// interrupted. Therefore it uses only nonblocking forms of MPI calls, and sleeps between two looks.
// An abandoned step stays in progress, with the memory that MPI reads and writes for it, until the
// process ends. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/rank_names.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "network/mpi/handle.hpp"
#include "network/mpi/threads.hpp"

namespace hsgd {

// The steps over a communicator; all are collective, except those marked as local. `what` completes
// the sentence "not all of 4 ranks ...". They throw HSGD_ERR_TIMEOUT, HSGD_ERR_PEER_LOST with the
// rank if MPI knows it, HSGD_ERR_INTERRUPTED, HSGD_ERR_SYSTEM.
class Steps {
 public:
  // `turn`: the caller's, released while a step waits. It must outlive this object.
  Steps(MPI_Comm comm, const hsgd_options& options, Turn& turn);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const RankNames& names() const { return names_; }
  Turn& turn() const { return turn_; }

  // Returns steps that last at most `limit_s` each, also if the options say to wait for late ranks.
  Steps within(double limit_s) const;

  // Waits for all ranks; the first step on a communicator of the program. It cannot be mistaken for
  // a collective that the program calls on another rank, and while it waits, MPI makes progress,
  // which others may need.
  void come();
  // Returns a communicator with the same ranks. MPI calls the copy functions of the program's
  // attributes.
  OwnComm duplicate();

  // These steps use messages on our own communicator: nonblocking collectives of libraries may be
  // linear in the number of ranks (Open MPI's MPI_Iallgather), or print messages when a rank dies.
  void broadcast(void* data, size_t bytes, int root, const char* what);
  uint64_t greatest(uint64_t own, const char* what);
  // Gathers every rank's row of `bytes`, by rank.
  void gather(const void* row, void* rows, size_t bytes, const char* what);
  // Does the same among the ranks in `members`, in that order; only they call it.
  void gather_among(const std::vector<int>& members, const void* row, void* rows, size_t bytes,
                    const char* what);

  // Throws if MPI knows that a rank has died. Local.
  void check_deaths(const char* what) const;

 private:
  struct UnderWay;
  using Step = std::unique_ptr<UnderWay>;
  struct Message {
    void* data;
    size_t bytes;
    int rank;  // of the other side, possibly plus a multiple of the size
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
  RankNames names_;
};

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_STEPS_HPP_
