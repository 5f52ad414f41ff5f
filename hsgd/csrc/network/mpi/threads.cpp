// MPI's thread levels, and turns.
#include "network/mpi/threads.hpp"

#include <mpi.h>

#include "network/mpi/handle.hpp"

namespace hsgd {
namespace {

// One mutex per process, because there is one MPI: communicators that know nothing of one another
// take turns. Never destroyed, because communicators may be destroyed after MPI and after static
// objects.
std::mutex& turns() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

}  // namespace

int thread_level() {
  int level = MPI_THREAD_SINGLE;
  check_mpi(PMPI_Query_thread(&level), "MPI_Query_thread");
  return level;
}

bool is_foreign_thread() {
  int level = MPI_THREAD_MULTIPLE;
  int is_main = 1;
  if (PMPI_Query_thread(&level) != MPI_SUCCESS || level >= MPI_THREAD_SERIALIZED) return false;
  return PMPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main == 0;
}

Turn::Turn(bool needed) {
  if (needed) lock_ = std::unique_lock<std::mutex>(turns());
}

}  // namespace hsgd
