// Messages between leaders over MPI point-to-point. Calls PMPI_* only, so that an interposer never
// sees them.
#ifndef HSGD_TRANSPORT_MPI_HPP_
#define HSGD_TRANSPORT_MPI_HPP_

#include <memory>

#include "mpi_handle.hpp"
#include "transport.hpp"

namespace hsgd {

// `leaders` has one rank per node, in node order.
std::unique_ptr<Transport> make_mpi_transport(OwnComm leaders);

}  // namespace hsgd

#endif  // HSGD_TRANSPORT_MPI_HPP_
