// Which MPI the program runs, against the one that this build was made for.
//
// Owns the reading of MPI_Get_library_version's line, and the rank of this process in an MPI whose
// handles are not those of this build. Without mpi.h: that is of the build's MPI.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_

#include <cstddef>

namespace hsgd::pmpi {

// Handles are alike within a family: MPICH and what stems from it (Intel MPI, MVAPICH, Cray MPICH)
// share one binary interface, as Open MPI 4 and 5 do. The standard one is that of MPI 5.
enum class MpiFamily { kOpenMpi, kMpich, kStandard };

struct MpiLibrary {
  MpiFamily family;
  int major;  // of kStandard: of the interface; 0: not known
};

// What the line, such as "Open MPI v5.0.11, package: ..." or "MPICH Version: 5.0.2", is of.
MpiLibrary library_of(const char* line);

// Whether a build for `built` can work on calls of the MPI that the program runs. Where it cannot,
// the first rank says so once, in one line.
bool works_with_running_mpi(const MpiLibrary& built);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_
