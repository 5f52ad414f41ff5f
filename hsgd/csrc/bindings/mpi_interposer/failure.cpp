// Creates the error codes of the interposer.
#include "bindings/mpi_interposer/failure.hpp"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include <chrono>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "hsgd_mpi.h"

// Weak: the program's libmpi may have been built without the extension.
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
#pragma weak PMPIX_Comm_is_revoked
#endif

namespace hsgd::pmpi {
namespace {

// The communicator of this thread's TakenCall; MPI_COMM_NULL: there is none.
thread_local MPI_Comm taken_on = MPI_COMM_NULL;

// Returns true if this communicator was awaited before; then its later calls fail at once, in the
// same way.
[[maybe_unused]] bool was_awaited(MPI_Comm comm) {
  static std::mutex mutex;
  static std::set<MPI_Comm> awaited;
  const std::lock_guard<std::mutex> lock(mutex);
  return !awaited.insert(comm).second;
}

// Returns MPI's code of the failure, if it has one. For the core, a peer that gave up because the
// communicator is revoked is lost; MPI's own notice may come a little later. A living peer that
// gave up, out of memory or at its deadline, is not a failed process for MPI.
std::optional<int> mpi_code_of([[maybe_unused]] MPI_Comm comm, [[maybe_unused]] int32_t code) {
#ifdef MPIX_ERR_PROC_FAILED
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kNoticeComes(3);
  const bool lost = code == HSGD_ERR_PEER_LOST;
  const bool waits = lost && !was_awaited(comm);
  const Clock::time_point end = Clock::now() + kNoticeComes;
  do {
    hsgd_mpi_progress();
    if (is_revoked(comm)) return MPIX_ERR_REVOKED;
    const bool may_be_death =
        lost || code == HSGD_ERR_CLOSED || code == HSGD_ERR_SYSTEM || code == HSGD_ERR_TIMEOUT;
    if (may_be_death && hsgd_mpi_dead_rank(&comm) >= 0) return MPIX_ERR_PROC_FAILED;
  } while (waits && Clock::now() < end);
#endif
  return std::nullopt;
}

// Returns an MPI error code of class MPI_ERR_OTHER; MPI_Error_string returns this text for it.
int code_with(const char* message) {
  static const int code = [] {
    int added = MPI_ERR_OTHER;
    PMPI_Add_error_code(MPI_ERR_OTHER, &added);
    return added;
  }();
  const std::string line = std::string("hsgd: ") + message;
  if (code != MPI_ERR_OTHER) {
    PMPI_Add_error_string(code, line.substr(0, MPI_MAX_ERROR_STRING - 1).c_str());
  }
  return code;
}

}  // namespace

bool is_revoked([[maybe_unused]] MPI_Comm comm) {
  int flag = 0;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
  if (PMPIX_Comm_is_revoked != nullptr) PMPIX_Comm_is_revoked(comm, &flag);
#endif
  return flag != 0;
}

TakenCall::TakenCall(MPI_Comm comm) : outer_(taken_on) { taken_on = comm; }
TakenCall::~TakenCall() { taken_on = outer_; }
bool TakenCall::is_pointless() { return taken_on != MPI_COMM_NULL && is_revoked(taken_on); }

int fail(MPI_Comm comm, const hsgd_error& error) {
  std::optional<int> status = mpi_code_of(comm, error.code);
#ifdef MPIX_ERR_REVOKED
  const bool is_news = status != MPIX_ERR_REVOKED;
#else
  const bool is_news = true;
#endif
  if (is_news) std::fprintf(stderr, "hsgd: error: %s\n", error.message);
  if (!status) status = code_with(error.message);
  PMPI_Comm_call_errhandler(comm, *status);
  return *status;
}

}  // namespace hsgd::pmpi
