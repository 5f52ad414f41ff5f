// make_mpi_transport(): messages between leaders over MPI point-to-point. Calls PMPI_* only, so
// that an interposer never sees them.
#ifndef HSGD_NETWORK_MPI_TRANSPORT_HPP_
#define HSGD_NETWORK_MPI_TRANSPORT_HPP_

#include <memory>

#include "core/base/rank_names.hpp"
#include "network/mpi/leave_notices.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// Takes turns if MPI needs that. `is_foreign_thread`: see Place; if such a thread closes the
// transport, other nodes are not told, because that would be a call of MPI. `names`: of the ranks
// of `leaders`.
std::unique_ptr<Transport> make_mpi_transport(Line leaders, bool (*is_foreign_thread)(),
                                              const RankNames& names = {});

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_TRANSPORT_HPP_
