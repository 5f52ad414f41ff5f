// Reports a failure of a taken call to the program as MPI would.
//
// Owns the error codes, and the view of MPI's fault tolerance (ULFM: Open MPI's extension "ftmpi",
// if the launcher enabled it): a communicator that the program has revoked ends every wait on it,
// and a process that died is MPIX_ERR_PROC_FAILED.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_

#include <mpi.h>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Returns true if some rank has revoked the communicator, as far as this rank knows.
bool is_revoked(MPI_Comm comm);

// While it exists, hsgd handles a call of MPI that this thread made on the communicator.
class TakenCall {
 public:
  explicit TakenCall(MPI_Comm comm);
  ~TakenCall();
  TakenCall(const TakenCall&) = delete;
  TakenCall& operator=(const TakenCall&) = delete;
  // Returns true if the taken call of this thread, if any, is on a revoked communicator.
  static bool is_pointless();

 private:
  MPI_Comm outer_;
};

// Passes the failure to the communicator's error handler: as MPIX_ERR_REVOKED or
// MPIX_ERR_PROC_FAILED if it is one of these, else as an MPI error of class MPI_ERR_OTHER with its
// message, which is also printed. Returns the result for the MPI function.
int fail(MPI_Comm comm, const hsgd_error& error);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_FAILURE_HPP_
