// drive_progress(): makes MPI progress in this process, for a rank that waits outside MPI.
//
// Owns a request that never completes: MPI_Test of an incomplete request drives everything in any
// MPI. MPI_Iprobe does not: MPICH only searches the messages that have arrived, and on
// MPI_COMM_SELF it does nothing more. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_PROGRESS_HPP_
#define HSGD_NETWORK_MPI_PROGRESS_HPP_

namespace hsgd {

// Local; returns at once. For threads that may call MPI. While one thread drives MPI, calls of
// other threads return without doing so: it drives MPI for all. MPI must be running. Throws if MPI
// cannot make the request.
void drive_progress();

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_PROGRESS_HPP_
