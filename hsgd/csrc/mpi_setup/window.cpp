// A notified exchange between nodes, over MPI.
#include <mpi.h>

#include <memory>
#include <utility>

#include "base/status.hpp"
#include "capi/handles.hpp"
#include "capi/notify_api.hpp"
#include "hsgd_mpi.h"
#include "mpi/rma.hpp"
#include "mpi_setup/comm.hpp"

int hsgd_mpi_exchange_create(const void* mpi_comm, hsgd_comm* comm,
                             const hsgd_exchange_options* options, hsgd_exchange** exchange,
                             hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *exchange = nullptr;
    const MPI_Comm ranks = *static_cast<const MPI_Comm*>(mpi_comm);
    *exchange = hsgd::new_exchange(comm, *options, [&](void* base, size_t bytes) {
      return hsgd::make_mpi_rma(hsgd::duplicate(ranks, comm->communicator->options()), base, bytes);
    });
  });
}
