// Compares the MPI that the program runs with the one of this build.
//
// Parses the line of MPI_Get_library_version, and finds the rank of this process in an MPI with
// handles that differ from those of this build. Does not include mpi.h, which is that of the
// build's MPI.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_

#include <cstddef>

namespace hsgd::pmpi {

// The families; handles are equal within a family: MPICH and its descendants (Intel MPI, MVAPICH,
// Cray MPICH) share one binary interface, as Open MPI 4 and 5 do. kStandard is the interface of MPI
// 5.
enum class MpiFamily { kOpenMpi, kMpich, kStandard };

struct MpiLibrary {
  MpiFamily family;
  int major;  // kStandard: version of the interface; 0: not known
};

// Returns the library of a line such as "Open MPI v5.0.11, package: ..." or "MPICH Version: 5.0.2".
MpiLibrary library_of(const char* line);

// Returns true if a build for `built` can handle calls of the MPI that the program runs. If not,
// the first rank prints that once, in one line.
bool works_with_running_mpi(const MpiLibrary& built);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_LIBRARY_HPP_
