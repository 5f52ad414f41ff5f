// How a failure of a taken call is told to the program, as MPI would tell it.
//
// Owns the error codes, and with them the view of MPI's fault tolerance (ULFM: Open MPI's extension
// "ftmpi", where the launcher was asked for it): a communicator that the program has revoked ends
// every wait on it, and a process that died is MPIX_ERR_PROC_FAILED.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_

#include <mpi.h>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Whether some rank has revoked it, as far as this one knows.
bool is_revoked(MPI_Comm comm);

// While it lives, this thread is in a taken call on the communicator.
class TakenCall {
 public:
  explicit TakenCall(MPI_Comm comm);
  ~TakenCall();
  TakenCall(const TakenCall&) = delete;
  TakenCall& operator=(const TakenCall&) = delete;
  // Whether the call of this thread, if there is one, is on a revoked communicator.
  static bool is_pointless();

 private:
  MPI_Comm outer_;
};

// Gives the failure to the communicator's error handler: as MPIX_ERR_REVOKED or
// MPIX_ERR_PROC_FAILED where it is that, or else as an MPI error of class MPI_ERR_OTHER with its
// message, which is printed, too. Returns what the MPI function shall return.
int fail(MPI_Comm comm, const hsgd_error& error);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_
