// Reads the settings of the interposer and creates its communicators.
#include "bindings/mpi_interposer/settings.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "bindings/mpi_interposer/counters.hpp"
#include "bindings/mpi_interposer/failure.hpp"
#include "bindings/mpi_interposer/library.hpp"
#include "bindings/mpi_interposer/messages.hpp"
#include "hsgd_mpi.h"

namespace hsgd::pmpi {
namespace {

constexpr int kExitCode = 2;
constexpr unsigned kGraceS = 5;

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  PMPI_Initialized(&initialized);
  PMPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

int world_rank() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

// Runs at each look of a rank that waits in a collective. The rank is inside an MPI call of the
// program, in which MPI promises progress to earlier messages: a peer may need one of them to reach
// this collective, and large ones take thousands of steps.
int go_on_with_messages() {
  if (!has_messages()) return 0;
  hsgd_mpi_progress();
  return 1;
}

// Does the same from time to time, also in programs without known messages: a share of the time far
// below the limit of a waiting rank.
int drive_mpi() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kSpell(200);
  const Clock::time_point end = Clock::now() + kSpell;
  do {
    if (hsgd_mpi_progress() != HSGD_OK) break;
  } while (Clock::now() < end);
  return TakenCall::is_pointless() ? 1 : 0;  // a revoked communicator ends the wait
}

// Warns of a late rank. MPI has no deadline: a rank may come to a collective hours after the
// others.
void warn_of_late_rank(const char* message) {
  std::fprintf(stderr, "hsgd: warning: %s\n", message);
}

// The delete function of an attribute of MPI_COMM_SELF: MPI_Finalize calls it first.
int print_report(MPI_Comm, int, void*, void*) {
  hsgd_counters sum;
  hsgd_mpi_cached_counters(&sum);
  std::fputs(report_line(world_rank(), sum).c_str(), stderr);
  return MPI_SUCCESS;
}

// Attributes are deleted in reverse order of creation, so the cache must have its own before.
void report_at_finalize() {
  hsgd_counters none;
  hsgd_mpi_cached_counters(&none);
  int key = MPI_KEYVAL_INVALID;
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, print_report, &key, nullptr);
  PMPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  PMPI_Comm_free_keyval(&key);  // freed with the attribute
}

#ifdef OPEN_MPI
constexpr MpiLibrary kBuiltFor{MpiFamily::kOpenMpi, OMPI_MAJOR_VERSION};
#elif !defined MPICH_NUMVERSION  // the header of the standard interface
constexpr MpiLibrary kBuiltFor{MpiFamily::kStandard, MPI_ABI_VERSION};
#else
constexpr MpiLibrary kBuiltFor{MpiFamily::kMpich, MPICH_NUMVERSION / 10'000'000};
#endif

struct Settings {
  hsgd_options options;
  bool usable;  // false: all calls use MPI

  Settings() : usable(works_with_running_mpi(kBuiltFor)) {
    if (!usable) return;
    hsgd_error error;
    if (hsgd_options_from_env(&options, &error) != HSGD_OK) refuse(error.message);
    options.process = hsgd_process_create();  // kept until the process ends
    options.interrupted = drive_mpi;
    options.progress = go_on_with_messages;
    if (options.timeout_given == 0) options.late = warn_of_late_rank;
    if (options.report != 0) report_at_finalize();
  }

  [[noreturn]] static void refuse(const char* message) {
    // Most likely all ranks have read the same setting: the first rank reports it and ends the job.
    if (world_rank() != 0) ::sleep(kGraceS);
    std::fprintf(stderr, "hsgd: error: %s\n", message);
    PMPI_Abort(MPI_COMM_WORLD, kExitCode);
    ::_exit(kExitCode);
  }
};

}  // namespace

const hsgd_options* settings() {
  // Partner: the store below. A thread that sees the address sees the settings. No program calls a
  // collective after MPI_Finalize, so the result stays valid.
  static std::atomic<const hsgd_options*> ready{nullptr};
  if (const hsgd_options* options = ready.load(std::memory_order_acquire)) return options;
  if (!mpi_is_running()) return nullptr;
  static const Settings read_once;
  if (!read_once.usable) return nullptr;
  ready.store(&read_once.options, std::memory_order_release);
  return &read_once.options;
}

int communicator_of(MPI_Comm comm, const hsgd_options& options, uint64_t bytes, bool at_once,
                    hsgd_comm** found, hsgd_error* err) {
  // The time of an MPI call, and of a communicator's set-up per rank: orders of magnitude, fixed,
  // so that all ranks choose alike.
  constexpr uint64_t kCallNs = 3'000;
  constexpr uint64_t kBytesPerNs = 4;
  constexpr uint64_t kPriceNs = 2'000'000;
  return hsgd_mpi_comm_cached(&comm, &options, kCallNs + bytes / kBytesPerNs,
                              at_once ? 0 : kPriceNs, found, err);
}

hsgd_comm* known_communicator_of(MPI_Comm comm) { return hsgd_mpi_comm_known(&comm); }

}  // namespace hsgd::pmpi
