// One-sided writes over an MPI-3 window. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_RMA_HPP_
#define HSGD_NETWORK_MPI_RMA_HPP_

#include <memory>

#include "network/mpi/handle.hpp"
#include "network/transport/ordered_rma.hpp"

namespace hsgd {

// Collective over `world`: makes a window on `bytes` bytes at `base` of each rank, open to all
// ranks while it lives. The memory outlives it.
std::unique_ptr<Rma> make_mpi_rma(OwnComm world, void* base, size_t bytes);

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_RMA_HPP_
