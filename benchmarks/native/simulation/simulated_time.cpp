// The wrapped functions. Names that begin with __wrap_ are the linker's, hence no style of ours.
#include "simulated_time.hpp"

#include <linux/futex.h>
#include <mpi.h>
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstddef>
#include <ctime>
#include <simgrid/s4u.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/os/shared_memory.hpp"

namespace simulation {
namespace {

// Where nothing is under way: as long as a look at the network takes.
constexpr double kLookS = 1e-6;

// One rank's requests as its transport last tested them, and what came while it waited.
struct Requests {
  MPI_Request* all = nullptr;
  int count = 0;
  std::vector<int> finished;
  std::vector<MPI_Status> statuses;  // of those
  Sent sent;
};

Requests& of_this_rank() {
  static std::unordered_map<long, Requests> by_rank;
  return by_rank[simgrid::s4u::this_actor::get_pid()];
}

bool is_rank() { return !simgrid::s4u::this_actor::is_maestro(); }

// Until one of them has finished.
void wait_for_messages() {
  Requests& own = of_this_rank();
  bool open = false;
  for (int i = 0; i < own.count && !open; ++i) open = own.all[i] != MPI_REQUEST_NULL;
  if (!own.finished.empty()) return;
  if (!open) return simgrid::s4u::this_actor::sleep_for(kLookS);
  const auto size = static_cast<size_t>(own.count);
  std::vector<int> finished(size);
  std::vector<MPI_Status> statuses(size);
  int count = 0;
  PMPI_Waitsome(own.count, own.all, &count, finished.data(), statuses.data());
  finished.resize(static_cast<size_t>(count));
  own.finished = std::move(finished);
  own.statuses = std::move(statuses);
}

}  // namespace

Sent sent_by_this_rank() { return of_this_rank().sent; }

}  // namespace simulation

// In the place of the core's weak one: memory that a thousand ranks reserve is taken when it is
// used.
namespace hsgd {
bool populate_shared(void*, int, size_t, size_t) { return true; }
}  // namespace hsgd

using simulation::is_rank;
using simulation::of_this_rank;
using simulation::wait_for_messages;

// NOLINTBEGIN
extern "C" {

int __real_PMPI_Testsome(int count, MPI_Request* requests, int* done, int* indices,
                         MPI_Status* statuses);
int __real_PMPI_Isend(const void* data, int count, MPI_Datatype type, int rank, int tag,
                      MPI_Comm comm, MPI_Request* request);
int __real_sched_yield();
int __real_nanosleep(const timespec* time, timespec* left);
long __real_syscall(long number, ...);
std::chrono::steady_clock::time_point __real__ZNSt6chrono3_V212steady_clock3nowEv();

// First what came while the rank waited: those requests are null by now, as tested ones are.
int __wrap_PMPI_Testsome(int count, MPI_Request* requests, int* done, int* indices,
                         MPI_Status* statuses) {
  auto& own = of_this_rank();
  own.all = requests;
  own.count = count;
  if (own.finished.empty()) return __real_PMPI_Testsome(count, requests, done, indices, statuses);
  *done = static_cast<int>(own.finished.size());
  for (size_t i = 0; i < own.finished.size(); ++i) {
    indices[i] = own.finished[i];
    statuses[i] = own.statuses[i];
  }
  own.finished.clear();
  return MPI_SUCCESS;
}

int __wrap_PMPI_Isend(const void* data, int count, MPI_Datatype type, int rank, int tag,
                      MPI_Comm comm, MPI_Request* request) {
  auto& own = of_this_rank();
  ++own.sent.messages;
  own.sent.bytes += static_cast<uint64_t>(count);  // the core sends bytes only
  return __real_PMPI_Isend(data, count, type, rank, tag, comm, request);
}

int __wrap_sched_yield() {
  if (!is_rank()) return __real_sched_yield();
  wait_for_messages();
  return 0;
}

int __wrap_nanosleep(const timespec* time, timespec* left) {
  if (!is_rank()) return __real_nanosleep(time, left);
  simgrid::s4u::this_actor::sleep_for(static_cast<double>(time->tv_sec) +
                                      1e-9 * static_cast<double>(time->tv_nsec));
  return 0;
}

long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex && is_rank() && (arguments[1] & FUTEX_CMD_MASK) == FUTEX_WAIT) {
    wait_for_messages();
    return 0;
  }
  return __real_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3],
                        arguments[4], arguments[5]);
}

// Never 0, which some take for "not yet".
std::chrono::steady_clock::time_point __wrap__ZNSt6chrono3_V212steady_clock3nowEv() {
  if (!is_rank()) return __real__ZNSt6chrono3_V212steady_clock3nowEv();
  const auto ns = 1'000'000'000 + static_cast<int64_t>(simgrid::s4u::Engine::get_clock() * 1e9);
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
}

}  // extern "C"
// NOLINTEND
