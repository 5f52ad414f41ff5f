// Recognizes the families of MPI.
#include "bindings/mpi_interposer/library.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
int PMPI_Get_library_version(char* version, int* length);
int PMPI_Comm_rank(uintptr_t comm, int* rank);
__attribute__((weak)) int PMPI_Abi_get_version(int* major, int* minor);
}

namespace hsgd::pmpi {
namespace {

constexpr char kOpenMpi[] = "Open MPI v";
constexpr size_t kVersionBytes = 16 << 10;  // MPICH's has 8192

const char* name_of(MpiFamily family) {
  switch (family) {
    case MpiFamily::kOpenMpi:
      return "Open MPI";
    case MpiFamily::kMpich:
      return "MPICH";
    case MpiFamily::kStandard:
      break;
  }
  return "the standard ABI";
}

// Returns MPI_COMM_WORLD of the running library.
uintptr_t world_of(MpiFamily family) {
  constexpr uintptr_t kMpichWorld = 0x44000000;
  if (family == MpiFamily::kMpich) return kMpichWorld;
  return reinterpret_cast<uintptr_t>(::dlsym(RTLD_DEFAULT, "ompi_mpi_comm_world"));
}

bool has_standard_interface(int major) {
  int found = 0, minor = 0;
  return PMPI_Abi_get_version != nullptr && PMPI_Abi_get_version(&found, &minor) == 0 &&
         found == major;
}

}  // namespace

MpiLibrary library_of(const char* line) {
  if (std::strncmp(line, kOpenMpi, sizeof kOpenMpi - 1) == 0)
    return {MpiFamily::kOpenMpi, std::atoi(line + sizeof kOpenMpi - 1)};
  const char* version = std::strstr(line, "MPICH Version:");
  if (version == nullptr) return {MpiFamily::kMpich, 0};
  version += std::strlen("MPICH Version:");
  return {MpiFamily::kMpich, std::atoi(version + std::strspn(version, " \t"))};
}

bool works_with_running_mpi(const MpiLibrary& built) {
  static char line[kVersionBytes];
  int length = 0;
  PMPI_Get_library_version(line, &length);
  line[std::strcspn(line, ",\n")] = '\0';
  const MpiLibrary running = library_of(line);
  if (built.family == MpiFamily::kStandard ? has_standard_interface(built.major)
                                           : running.family == built.family) {
    return true;
  }
  int rank = 0;
  if (const uintptr_t world = world_of(running.family)) PMPI_Comm_rank(world, &rank);
  if (rank == 0) {
    std::fprintf(stderr,
                 "hsgd: warning: built for %s %d, and this program runs %s: all its calls stay "
                 "with MPI; install hsgd again with this MPI\n",
                 name_of(built.family), built.major, line);
  }
  return false;
}

}  // namespace hsgd::pmpi
