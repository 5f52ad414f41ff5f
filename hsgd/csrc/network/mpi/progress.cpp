// Makes a generalized request, which MPI keeps until it is finalized.
#include "network/mpi/progress.hpp"

#include <mpi.h>

#include <mutex>

#include "core/base/status.hpp"
#include "hsgd_mpi.h"
#include "network/mpi/handle.hpp"

namespace hsgd {
namespace {

int no_status(void*, MPI_Status* status) {
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  return MPI_SUCCESS;
}
int nothing_to_free(void*) { return MPI_SUCCESS; }
int nothing_to_cancel(void*, int) { return MPI_SUCCESS; }

class OpenRequest {
 public:
  OpenRequest() {
    check_mpi(
        PMPI_Grequest_start(no_status, nothing_to_free, nothing_to_cancel, nullptr, &request_),
        "MPI_Grequest_start");
  }
  ~OpenRequest() {
    PMPI_Grequest_complete(request_);
    PMPI_Wait(&request_, MPI_STATUS_IGNORE);
  }
  OpenRequest(const OpenRequest&) = delete;
  OpenRequest& operator=(const OpenRequest&) = delete;

  // Two threads must not test one request at the same time.
  void test() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    int flag = 0;
    if (lock.owns_lock()) PMPI_Test(&request_, &flag, MPI_STATUS_IGNORE);
  }

 private:
  std::mutex mutex_;
  MPI_Request request_ = MPI_REQUEST_NULL;
};

}  // namespace

void drive_progress() {
  auto* const request = UntilFinalize<OpenRequest>::get();
  if (request != nullptr) request->test();
}

}  // namespace hsgd

int hsgd_mpi_progress(void) { return hsgd::guarded(nullptr, hsgd::drive_progress); }
