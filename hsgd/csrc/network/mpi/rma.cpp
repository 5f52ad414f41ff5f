// Single writes over MPI: one window, one lock_all, requests instead of flushes that wait.
//
// The window lies on the shared segment (MPI_Win_create), not in memory of MPI's own
// (MPI_Win_allocate): local and remote ranks then write into the same memory, and it is as fast
// (docs/internals/tree.md). A flush has no deadline, so it is called only for operations whose
// requests are done: with Open MPI over TCP, a request is done when the target has answered, and
// the flush has nothing to wait for.
#include "network/mpi/rma.hpp"

#include <time.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "core/base/error.hpp"

namespace hsgd {
namespace {

void check_memory_model(MPI_Win window) {
  int* model = nullptr;
  int found = 0;
  check_mpi(PMPI_Win_get_attr(window, MPI_WIN_MODEL, &model, &found), "MPI_Win_get_attr");
  if (found != 0 && *model == MPI_WIN_UNIFIED) return;
  throw_error(HSGD_ERR_SYSTEM, -1,
              "this MPI keeps separate public and private copies of windows (MPI_WIN_SEPARATE), "
              "which notifications cannot use; use one with the unified memory model");
}

class MpiWindow final : public UnorderedWrites {
 public:
  MpiWindow(OwnComm world, void* base, size_t bytes) : world_(std::move(world)) {
    check_mpi(PMPI_Win_create(base, static_cast<MPI_Aint>(bytes), 1, MPI_INFO_NULL, world_.get(),
                              &window_),
              "MPI_Win_create");
    PMPI_Win_set_errhandler(window_, MPI_ERRORS_RETURN);
    check_memory_model(window_);
    check_mpi(PMPI_Win_lock_all(MPI_MODE_NOCHECK, window_), "MPI_Win_lock_all");
    meet_peers();
  }

  void reserve(size_t tickets) override { requests_.reserve(requests_.size() + tickets); }
  Ticket put(int target, const void* data, size_t bytes, size_t offset) override {
    HSGD_CHECK(bytes <= INT_MAX);
    const Ticket ticket = free_ticket();
    const auto count = static_cast<int>(bytes);
    check_mpi(PMPI_Rput(data, count, MPI_BYTE, target, static_cast<MPI_Aint>(offset), count,
                        MPI_BYTE, window_, &requests_[ticket].request),
              "MPI_Rput");
    return ticket;
  }

  Ticket replace(int target, const uint64_t* version, size_t offset) override {
    const Ticket ticket = free_ticket();
    check_mpi(PMPI_Raccumulate(version, 1, MPI_UINT64_T, target, static_cast<MPI_Aint>(offset), 1,
                               MPI_UINT64_T, MPI_REPLACE, window_, &requests_[ticket].request),
              "MPI_Raccumulate");
    return ticket;
  }

  bool done(Ticket ticket) override {
    int flag = 0;
    check_mpi(PMPI_Test(&requests_[ticket].request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    if (flag != 0) requests_[ticket].used = false;
    return flag != 0;
  }

  void flush(int target) override { check_mpi(PMPI_Win_flush(target, window_), "MPI_Win_flush"); }
  void sync() override { check_mpi(PMPI_Win_sync(window_), "MPI_Win_sync"); }

  // MPI_Win_free waits for all ranks without a deadline, so the ranks meet before it, with one.
  bool close(const Deadline& deadline) noexcept override {
    if (mpi_is_finalized()) return true;
    MPI_Request here = MPI_REQUEST_NULL;
    if (PMPI_Ibarrier(world_.get(), &here) != MPI_SUCCESS) return leave();
    for (int64_t nap_ns = 1'000;; nap_ns = std::min<int64_t>(2 * nap_ns, 1'000'000)) {
      int all = 0;
      if (PMPI_Test(&here, &all, MPI_STATUS_IGNORE) != MPI_SUCCESS) return leave();
      if (all != 0) break;
      if (deadline.passed()) return leave();
      timespec nap{};
      nap.tv_nsec = nap_ns;
      ::nanosleep(&nap, nullptr);
    }
    PMPI_Win_unlock_all(window_);
    PMPI_Win_free(&window_);
    return true;
  }

 private:
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    bool used = false;
  };

  // Makes every rank access every other rank, while all ranks are in MPI. At the first access Open
  // MPI asks a peer about its window and waits for the answer, also in calls that must not wait.
  void meet_peers() {
    int size = 0;
    check_mpi(PMPI_Comm_size(world_.get(), &size), "MPI_Comm_size");
    std::vector<char> bytes(static_cast<size_t>(size));
    for (int peer = 0; peer < size; ++peer) {
      check_mpi(
          PMPI_Get(&bytes[static_cast<size_t>(peer)], 1, MPI_BYTE, peer, 0, 1, MPI_BYTE, window_),
          "MPI_Get");
    }
    check_mpi(PMPI_Win_flush_all(window_), "MPI_Win_flush_all");
    check_mpi(PMPI_Barrier(world_.get()), "MPI_Barrier");
  }

  // Leaks the communicator until the process ends: a barrier that never ends uses it.
  bool leave() noexcept {
    new OwnComm(std::move(world_));
    return false;
  }

  Ticket free_ticket() {
    const auto slot =
        std::find_if(requests_.begin(), requests_.end(), [](const Slot& s) { return !s.used; });
    const auto ticket = static_cast<Ticket>(slot - requests_.begin());
    if (slot == requests_.end()) requests_.emplace_back();
    requests_[ticket].used = true;
    return ticket;
  }

  OwnComm world_;
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<Slot> requests_;
};

}  // namespace

std::unique_ptr<Rma> make_mpi_rma(OwnComm world, void* base, size_t bytes) {
  return make_ordered_rma(std::make_unique<MpiWindow>(std::move(world), base, bytes));
}

}  // namespace hsgd
