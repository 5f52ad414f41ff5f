// Converts MPI errors, and frees handles.
#include "network/mpi/handle.hpp"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include "core/base/error.hpp"

namespace hsgd {

bool mpi_is_finalized() {
  int finalized = 0;
  PMPI_Finalized(&finalized);
  return finalized != 0;
}

QuietErrors::QuietErrors(MPI_Comm comm) : comm_(comm) {
  if (PMPI_Comm_get_errhandler(comm, &programs_) != MPI_SUCCESS) programs_ = MPI_ERRHANDLER_NULL;
  PMPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
}

QuietErrors::~QuietErrors() {
  if (programs_ == MPI_ERRHANDLER_NULL) return;
  PMPI_Comm_set_errhandler(comm_, programs_);
  PMPI_Errhandler_free(&programs_);
}

OwnComm::~OwnComm() {
  if (comm_ != MPI_COMM_NULL && !mpi_is_finalized()) PMPI_Comm_free(&comm_);
}

void check_mpi(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  PMPI_Error_string(status, words, &length);
  hsgd_status code = HSGD_ERR_SYSTEM;
#ifdef MPIX_ERR_PROC_FAILED  // if the launcher was told so, as with mpirun --with-ft ulfm
  int kind = MPI_SUCCESS;
  PMPI_Error_class(status, &kind);
  if (kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_PROC_FAILED_PENDING ||
      kind == MPIX_ERR_REVOKED) {
    code = HSGD_ERR_PEER_LOST;
  }
#endif
  throw_error(code, -1, "%s failed: %s", what, words);
}

}  // namespace hsgd
