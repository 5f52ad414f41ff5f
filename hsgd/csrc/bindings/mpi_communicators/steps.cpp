// Steps: starts nonblocking calls and waits for them.
#include "bindings/mpi_communicators/steps.hpp"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "network/mpi/deaths.hpp"

namespace hsgd {
namespace {

constexpr const char* kCome = "began it";
constexpr int kSetUpTag = 16;  // different from the tags of leaders

bool is_done(MPI_Request* request) {
  int flag = 1;
  if (*request != MPI_REQUEST_NULL) {
    check_mpi(PMPI_Test(request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
  }
  return flag != 0;
}

}  // namespace

struct Steps::UnderWay {
  explicit UnderWay(size_t bytes = 0) : data(bytes) {}
  std::vector<std::byte> data;
  MPI_Comm duplicate = MPI_COMM_NULL;
  MPI_Request in = MPI_REQUEST_NULL;
  MPI_Request out = MPI_REQUEST_NULL;

  // The wait reports failures later: until then other calls may be in progress.
  void note(int status, const char* call) {
    if (status == MPI_SUCCESS || failed != MPI_SUCCESS) return;
    failed = status;
    failed_call = call;
  }
  bool is_done() {
    check_mpi(failed, failed_call);
    return hsgd::is_done(&in) && hsgd::is_done(&out);
  }

 private:
  int failed = MPI_SUCCESS;
  const char* failed_call = "";
};

Steps::Steps(MPI_Comm comm, const hsgd_options& options, Turn& turn)
    : comm_(comm), options_(options), turn_(turn) {
  check_mpi(PMPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
  check_mpi(PMPI_Comm_size(comm, &size_), "MPI_Comm_size");
  names_ = RankNames(options.rank_names, size_);
}

Steps Steps::within(double limit_s) const {
  Steps brief = *this;
  brief.options_.timeout_s = std::min(limit_s, options_.timeout_s);
  brief.options_.late = nullptr;
  return brief;
}

void Steps::come() {
  auto step = std::make_unique<UnderWay>();
  step->note(PMPI_Ibarrier(comm_, &step->in), "MPI_Ibarrier");
  finish(step, kCome);
}

OwnComm Steps::duplicate() {
  auto step = std::make_unique<UnderWay>();
  step->note(PMPI_Comm_idup(comm_, &step->duplicate, &step->in), "MPI_Comm_idup");
  finish(step, "made a communicator of their own");
  OwnComm own(step->duplicate);
  check_mpi(PMPI_Comm_set_errhandler(own.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return own;
}

// Sends down a binomial tree: rank r above the root receives from the rank without r's highest bit.
void Steps::broadcast(void* data, size_t bytes, int root, const char* what) {
  auto step = std::make_unique<UnderWay>(bytes);
  std::memcpy(step->data.data(), data, bytes);
  const int above = (rank_ - root + size_) % size_;
  int bit = 1;
  for (; bit <= above; bit *= 2) continue;
  if (above > 0) {
    receive(step, {step->data.data(), bytes, above - bit / 2 + root});
    finish(step, what);
  }
  for (; above + bit < size_; bit *= 2) {
    send(step, {step->data.data(), bytes, above + bit + root});
    finish(step, what);
  }
  std::memcpy(data, step->data.data(), bytes);
}

// Finds the greatest value by dissemination (Hensgen, Finkel and Manber, 1988), a barrier algorithm
// that also works for a maximum, because a value may count twice.
uint64_t Steps::greatest(uint64_t own, const char* what) {
  uint64_t known[2] = {own, 0};
  auto step = std::make_unique<UnderWay>(sizeof known);
  std::byte* const mine = step->data.data();
  std::byte* const heard = mine + sizeof known[0];
  for (int distance = 1; distance < size_; distance *= 2) {
    std::memcpy(mine, known, sizeof known[0]);
    receive(step, {heard, sizeof known[1], rank_ + size_ - distance});
    send(step, {mine, sizeof known[0], rank_ + distance});
    finish(step, what);
    std::memcpy(&known[1], heard, sizeof known[1]);
    known[0] = std::max(known[0], known[1]);
  }
  return known[0];
}

void Steps::gather(const void* row, void* rows, size_t bytes, const char* what) {
  std::vector<int> all(static_cast<size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  gather_among(all, row, rows, bytes, what);
}

// Gathers in rounds; each doubles the rows that a rank has (Bruck et al., IEEE TPDS 8(11), 1997).
void Steps::gather_among(const std::vector<int>& members, const void* row, void* rows, size_t bytes,
                         const char* what) {
  const size_t size = members.size();
  const auto me =
      static_cast<size_t>(std::find(members.begin(), members.end(), rank_) - members.begin());
  // Rows in rank order from this rank's on, wrapping around.
  auto step = std::make_unique<UnderWay>(size * bytes);
  std::byte* const held = step->data.data();
  std::memcpy(held, row, bytes);
  for (size_t distance = 1; distance < size; distance *= 2) {
    const size_t offset = distance * bytes;
    const size_t some = std::min(offset, size * bytes - offset);
    receive(step, {held + offset, some, members[(me + distance) % size]});
    send(step, {held, some, members[(me + size - distance) % size]});
    finish(step, what);
  }
  auto* const ordered = static_cast<std::byte*>(rows);
  std::memcpy(ordered + me * bytes, held, (size - me) * bytes);
  std::memcpy(ordered, held + (size - me) * bytes, me * bytes);
}

void Steps::receive(Step& step, const Message& from) {
  step->note(PMPI_Irecv(from.data, static_cast<int>(from.bytes), MPI_BYTE, from.rank % size_,
                        kSetUpTag, comm_, &step->in),
             "MPI_Irecv");
}

void Steps::send(Step& step, const Message& to) {
  step->note(PMPI_Isend(to.data, static_cast<int>(to.bytes), MPI_BYTE, to.rank % size_, kSetUpTag,
                        comm_, &step->out),
             "MPI_Isend");
}

void Steps::finish(Step& step, const char* what) {
  try {
    wait(*step, what);
  } catch (...) {
    static_cast<void>(step.release());  // MPI may still write there
    throw;
  }
}

void Steps::wait(UnderWay& step, const char* what) {
  constexpr int kYields = 64;
  constexpr int64_t kLongestNapNs = 1'000'000;
  constexpr int64_t kLookNs = 20'000'000;
  Deadline deadline(options_.timeout_s, options_.interrupted);
  int64_t next_look_ns = now_ns() + kLookNs;
  int64_t nap_ns = 1'000;
  for (int looks = 0;; ++looks) {
    try {
      if (step.is_done()) return;
    } catch (const Error& error) {
      look_around(deadline, what);
      throw_error(error.code(), error.rank(), "set-up over MPI: not all of %d ranks %s: %s", size_,
                  what, error.what());
    }
    if (looks < kYields) {
      turn_.leave_for([] { sched_yield(); });
      continue;
    }
    if (now_ns() >= next_look_ns) {
      look_around(deadline, what);
      next_look_ns = now_ns() + kLookNs;
    }
    if (deadline.passed()) {
      say_late(what);
      deadline = deadline.renewed(options_.timeout_s);
    }
    turn_.leave_for([&] {
      timespec nap{};
      nap.tv_nsec = nap_ns;
      ::nanosleep(&nap, nullptr);
    });
    nap_ns = std::min(2 * nap_ns, kLongestNapNs);
  }
}

void Steps::look_around(const Deadline& deadline, const char* what) const {
  bool interrupted = false;
  turn_.leave_for([&] { interrupted = deadline.interrupted(); });
  if (interrupted) throw_error(HSGD_ERR_INTERRUPTED, -1, "set-up over MPI: interrupted");
  check_deaths(what);
}

void Steps::check_deaths(const char* what) const {
  const int dead = names_.of(dead_rank_of(comm_));
  if (dead < 0) return;
  throw_error(HSGD_ERR_PEER_LOST, dead, "set-up over MPI: rank %d died before all of %d ranks %s",
              dead, size_, what);
}

// Throws, unless the options say to wait for late ranks: then waiting ranks report that. MPI does
// not tell which ranks wait, so ranks 0, 1, 2, 4, 8 and so on report: few lines, and not all of
// these ranks are late.
void Steps::say_late(const char* what) const {
  const char* advice =
      what == kCome ? "every rank needs hsgd and the same HSGD_* settings (Open MPI on several "
                      "hosts: mpirun -x LD_PRELOAD -x HSGD_...)"
                    : "all had begun it, so one has died, was stopped or hangs since: look for it "
                      "on all nodes, or raise HSGD_TIMEOUT_S";
  const std::string late = text("set-up over MPI: not all of %d ranks %s within %g s; %s", size_,
                                what, options_.timeout_s, advice);
  if (options_.late == nullptr) throw Error(HSGD_ERR_TIMEOUT, -1, late);
  if ((rank_ & (rank_ - 1)) == 0) {
    options_.late((late + "; still waiting (set HSGD_TIMEOUT_S to make this an error)").c_str());
  }
}

}  // namespace hsgd
