// Has MPI go on with what is under way in this process, for a rank that waits outside MPI.
//
// Owns a request that never completes: MPI_Test of a request that is not complete drives everything
// in any MPI. MPI_Iprobe does not: MPICH looks among the messages that are there, and on
// MPI_COMM_SELF it looks no further. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_PROGRESS_HPP_
#define HSGD_NETWORK_MPI_PROGRESS_HPP_

namespace hsgd {

// Local, returns at once, for threads that may call MPI. While one thread drives MPI, the others
// return without: it does so for all. MPI must be running. Throws where MPI cannot make the
// request.
void drive_progress();

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_PROGRESS_HPP_
