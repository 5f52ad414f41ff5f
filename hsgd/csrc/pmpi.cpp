// The interposer: MPI_Allreduce of large payloads takes the two-level path, everything else passes
// through to PMPI.
//
// The choice depends on byte count, op, datatype and communicator alone, which are equal on all
// ranks; never on buffers, which may differ (one rank may pass MPI_IN_PLACE). Owns the settings,
// read once, and the count of calls; communicators are cached by libhsgd_mpi as attributes. Fortran
// programs are seen only where MPI's Fortran functions call the C ones (MPICH, not Open MPI).
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <optional>
#include <string>

#include "hsgd_core.h"
#include "hsgd_mpi.h"

namespace {

constexpr int kExitCode = 2;
constexpr unsigned kGraceS = 5;

std::atomic<uint64_t> passed_calls{0};

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

// Delete function of an attribute of MPI_COMM_SELF: called first thing in MPI_Finalize.
int print_report(MPI_Comm, int, void*, void*) {
  hsgd_counters sum;
  hsgd_mpi_cached_counters(&sum);
  const auto count = [](uint64_t number) { return static_cast<unsigned long long>(number); };
  const auto mega = [](uint64_t number) { return static_cast<double>(number) * 1e-6; };
  std::fprintf(
      stderr,
      "hsgd: rank %d: MPI_Allreduce: %llu calls with %.3f MB took the two-level path, %llu "
      "passed through to MPI; %.3f MB moved inside the node, %.3f MB sent to and %.3f MB "
      "received from other nodes, %.3f s, of which %.3f s waiting\n",
      world_rank(), count(sum.calls), mega(sum.payload_bytes), count(passed_calls),
      mega(sum.intra_bytes), mega(sum.inter_bytes_sent), mega(sum.inter_bytes_received),
      static_cast<double>(sum.total_ns) * 1e-9, static_cast<double>(sum.wait_ns) * 1e-9);
  return MPI_SUCCESS;
}

// Attributes go in the reverse order of their coming, so the cache must have its own before.
void report_at_finalize() {
  hsgd_counters none;
  hsgd_mpi_cached_counters(&none);
  int key = MPI_KEYVAL_INVALID;
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, print_report, &key, nullptr);
  PMPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  PMPI_Comm_free_keyval(&key);  // goes with the attribute
}

struct Settings {
  hsgd_options options;

  Settings() {
    hsgd_error error;
    if (hsgd_options_from_env(&options, &error) != HSGD_OK) refuse(error.message);
    if (options.report != 0) report_at_finalize();
  }

  [[noreturn]] static void refuse(const char* message) {
    // Most likely all ranks have read the same: the first one says it for all, and ends all.
    if (world_rank() != 0) ::sleep(kGraceS);
    std::fprintf(stderr, "hsgd: error: %s\n", message);
    PMPI_Abort(MPI_COMM_WORLD, kExitCode);
    ::_exit(kExitCode);
  }
};

// Read at the first call, when MPI is running.
const hsgd_options& settings() {
  static const Settings read_once;
  return read_once.options;
}

std::optional<hsgd_op> known_op(MPI_Op op) {
  if (op == MPI_SUM) return HSGD_SUM;
  if (op == MPI_MAX) return HSGD_MAX;
  if (op == MPI_MIN) return HSGD_MIN;
  if (op == MPI_PROD) return HSGD_PROD;
  return std::nullopt;
}

std::optional<hsgd_dtype> signed_integer(size_t bytes) {
  if (bytes == 1) return HSGD_INT8;
  if (bytes == 4) return HSGD_INT32;
  if (bytes == 8) return HSGD_INT64;
  return std::nullopt;
}

// Predefined datatypes only: derived ones pass through.
std::optional<hsgd_dtype> known_dtype(MPI_Datatype type) {
  if (type == MPI_FLOAT) return HSGD_FLOAT32;
  if (type == MPI_DOUBLE) return HSGD_FLOAT64;
  if (type == MPI_INT || type == MPI_INT32_T) return HSGD_INT32;
  if (type == MPI_INT64_T || type == MPI_LONG_LONG) return HSGD_INT64;
  if (type == MPI_LONG) return signed_integer(sizeof(long));
  if (type == MPI_INT8_T || type == MPI_SIGNED_CHAR) return HSGD_INT8;
  if (type == MPI_UINT8_T || type == MPI_UNSIGNED_CHAR) return HSGD_UINT8;
  return std::nullopt;
}

// An MPI error code of class MPI_ERR_OTHER with this text, as MPI_Error_string tells it.
int error_code(const char* message) {
  static const int code = [] {
    int added = MPI_ERR_OTHER;
    PMPI_Add_error_code(MPI_ERR_OTHER, &added);
    return added;
  }();
  const std::string line = std::string("hsgd: ") + message;
  if (code != MPI_ERR_OTHER) {
    PMPI_Add_error_string(code, line.substr(0, MPI_MAX_ERROR_STRING - 1).c_str());
  }
  return code;
}

struct Call {
  const void* in;
  void* out;
  MPI_Count count;
  MPI_Datatype type;
  MPI_Op op;
  MPI_Comm comm;
};

// What MPI_Allreduce returns when the two-level path took the call; nothing when MPI shall.
std::optional<int> take(const Call& call) {
  if (call.count <= 0 || call.comm == MPI_COMM_NULL || !mpi_is_running()) return std::nullopt;
  const hsgd_options& options = settings();
  const std::optional<hsgd_op> op = known_op(call.op);
  const std::optional<hsgd_dtype> dtype = known_dtype(call.type);
  if (!op || !dtype) return std::nullopt;
  // A mistake that MPI reports by itself, on this rank alone; the others wait as they would anyway.
  if (call.out == MPI_IN_PLACE) return std::nullopt;
  const auto count = static_cast<uint64_t>(call.count);
  if (count * hsgd_dtype_bytes(*dtype) < options.min_bytes) return std::nullopt;
  hsgd_comm* comm = nullptr;
  hsgd_error error;
  int code = hsgd_mpi_comm_cached(&call.comm, &options, &comm, &error);
  if (code == HSGD_OK) {
    if (comm == nullptr) return std::nullopt;
    const void* in = call.in == MPI_IN_PLACE ? call.out : call.in;
    code = hsgd_comm_allreduce(comm, in, call.out, count, *dtype, *op, nullptr, &error);
    if (code == HSGD_OK) return MPI_SUCCESS;
  }
  std::fprintf(stderr, "hsgd: error: %s\n", error.message);
  const int status = error_code(error.message);
  PMPI_Comm_call_errhandler(call.comm, status);
  return status;
}

// A call that MPI makes, whether it succeeds or not.
void count_passed() { passed_calls.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

extern "C" {

HSGD_API int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                           MPI_Comm comm) {
  if (const auto status = take({in, out, count, type, op, comm})) return *status;
  count_passed();
  return PMPI_Allreduce(in, out, count, type, op, comm);
}

#if MPI_VERSION >= 4
HSGD_API int MPI_Allreduce_c(const void* in, void* out, MPI_Count count, MPI_Datatype type,
                             MPI_Op op, MPI_Comm comm) {
  if (const auto status = take({in, out, count, type, op, comm})) return *status;
  count_passed();
  return PMPI_Allreduce_c(in, out, count, type, op, comm);
}
#endif

// For self-checks: 1 when this library is the one that answers MPI_Allreduce for the caller's
// scope.
HSGD_API int hsgd_interposer_active(void) { return 1; }

// What took the two-level path in this process so far; waits for collectives that are under way.
HSGD_API void hsgd_interposer_counters(hsgd_counters* counters) {
  hsgd_mpi_cached_counters(counters);
}

// How many calls passed through to MPI in this process so far.
HSGD_API uint64_t hsgd_interposer_passed(void) { return passed_calls; }

}  // extern "C"
