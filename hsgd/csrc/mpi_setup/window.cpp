// A notified window between nodes, over MPI.
#include <mpi.h>

#include <memory>
#include <utility>

#include "base/status.hpp"
#include "capi/handles.hpp"
#include "capi/window_api.hpp"
#include "hsgd_mpi.h"
#include "mpi/rma.hpp"
#include "mpi_setup/comm.hpp"

int hsgd_mpi_window_create(const void* mpi_comm, hsgd_comm* comm,
                           const hsgd_window_options* options, hsgd_window** window,
                           hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *window = nullptr;
    const MPI_Comm ranks = *static_cast<const MPI_Comm*>(mpi_comm);
    *window = hsgd::new_window(comm, *options, [&](void* base, size_t bytes) {
      return hsgd::make_mpi_rma(hsgd::duplicate(ranks, comm->communicator->options()), base, bytes);
    });
  });
}
