// Posts one receive from any leader, sends one message to each, and keeps the lines of this
// process.
#include "network/mpi/leave_notices.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/os/wait.hpp"
#include "network/mpi/deaths.hpp"

namespace hsgd {
namespace {

constexpr int kPartingTag = 15;  // different from all values of Channel
// How long MPI_Finalize waits for ranks that may never come: ranks that died while MPI lets the
// others live.
constexpr double kFinalizeS = 10.0;
constexpr std::chrono::microseconds kBetweenLooks{50};

}  // namespace

// Lines in use on this rank, and lines that this rank has given up and others have not.
class Lines {
 public:
  void enter(PartingLine* line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.insert(line);
    drop_finished();
  }

  void leave(PartingLine* line) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.erase(line);
  }

  void keep(std::unique_ptr<PartingLine> line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.erase(line.get());
    line->kept_ = true;
    if (finishing_) return drop(std::move(line));
    ended_.push_back(std::move(line));
    drop_finished();
  }

  // Called in MPI_Finalize, after which this rank has no more collectives. No communicator is made
  // after it, so later messages cannot be taken for messages of another.
  void finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finishing_ = true;
    for (PartingLine* line : used_) line->say({});
    const Deadline deadline(kFinalizeS);
    while (!all_over() && !deadline.passed()) std::this_thread::sleep_for(kBetweenLooks);
    for (auto& line : ended_) drop(std::move(line));
    ended_.clear();
  }

 private:
  static void drop(std::unique_ptr<PartingLine> line) {
    if (!line->is_sent()) static_cast<void>(line.release());  // MPI may still read from it
  }

  void drop_finished() {
    ended_.erase(std::remove_if(ended_.begin(), ended_.end(),
                                [](const auto& line) { return line->is_over(); }),
                 ended_.end());
  }

  // Returns true if there is nothing to wait for: each line has finished, or MPI failed on it.
  bool all_over() {
    drop_finished();
    bool over =
        std::all_of(ended_.begin(), ended_.end(), [](const auto& line) { return line->broken_; });
    for (PartingLine* line : used_) over &= line->is_over() || line->broken_;
    return over;
  }

  std::mutex mutex_;  // guards all members below
  std::set<PartingLine*> used_;
  std::vector<std::unique_ptr<PartingLine>> ended_;
  bool finishing_ = false;
};

namespace {

// Lines of this process. Each line holds them, too: it may end after MPI has destroyed this.
struct ThisProcess {
  std::shared_ptr<Lines> lines = std::make_shared<Lines>();
  ~ThisProcess() { lines->finish(); }
};

std::shared_ptr<Lines> lines_of_process() {
  const auto* process = UntilFinalize<ThisProcess>::get();
  return process != nullptr ? process->lines : std::make_shared<Lines>();
}

}  // namespace

void expect_lines() { lines_of_process(); }

PartingLine::PartingLine(Line leaders) : lines_(lines_of_process()), leaders_(std::move(leaders)) {
  sends_.reserve(leaders_.ranks.size());
  lines_->enter(this);
  const int status = listen();
  if (status != MPI_SUCCESS) lines_->leave(this);
  check_mpi(status, "MPI_Irecv");
}

PartingLine::~PartingLine() {
  if (!kept_) lines_->leave(this);
  if (receive_ == MPI_REQUEST_NULL || mpi_is_finalized()) return;
  PMPI_Cancel(&receive_);
  PMPI_Wait(&receive_, MPI_STATUS_IGNORE);
}

// Posts one receive at a time, long before the message comes.
int PartingLine::listen() {
  if (has_heard_all()) return MPI_SUCCESS;
  const int status =
      PMPI_Irecv(&in_, sizeof in_, MPI_BYTE, MPI_ANY_SOURCE, kPartingTag, comm(), &receive_);
  if (status != MPI_SUCCESS) receive_ = MPI_REQUEST_NULL;
  return status;
}

void PartingLine::say(const Parting& parting) noexcept {
  if (std::exchange(said_, true) || mpi_is_finalized()) return;
  out_ = parting;
  const int own = leaders_.ranks[static_cast<size_t>(rank())];
  for (const int leader : leaders_.ranks) {
    MPI_Request request = MPI_REQUEST_NULL;
    if (leader != own && PMPI_Isend(&out_, sizeof out_, MPI_BYTE, leader, kPartingTag, comm(),
                                    &request) == MPI_SUCCESS) {
      sends_.push_back(request);
    }
  }
  is_sent();  // makes MPI progress
}

bool PartingLine::hear(Parting* parting) {
  if (receive_ == MPI_REQUEST_NULL) return false;
  int flag = 0;
  MPI_Status from;
  const int status = PMPI_Test(&receive_, &flag, &from);
  if (status != MPI_SUCCESS) {
    broken_ = true;
    acknowledge_deaths(comm());
    if (receive_ == MPI_REQUEST_NULL) static_cast<void>(listen());
    check_mpi(status, "MPI_Test");
  }
  if (flag == 0) return false;
  *parting = in_;
  parting->line[sizeof parting->line - 1] = '\0';
  parted_.push_back(from.MPI_SOURCE);
  broken_ |= listen() != MPI_SUCCESS;  // the received message counts in any case
  return true;
}

bool PartingLine::has_parted(int rank) const {
  return std::find(parted_.begin(), parted_.end(), rank) != parted_.end();
}

bool PartingLine::is_sent() noexcept {
  int flag = 0;
  const int status =
      PMPI_Testall(static_cast<int>(sends_.size()), sends_.data(), &flag, MPI_STATUSES_IGNORE);
  return status == MPI_SUCCESS && flag != 0;
}

bool PartingLine::is_over() noexcept {
  if (broken_) return false;
  try {
    Parting ignored;
    while (hear(&ignored)) continue;
  } catch (const Error&) {
    broken_ = true;
  }
  return !broken_ && has_heard_all() && is_sent();
}

void PartingLine::end(std::unique_ptr<PartingLine> line) noexcept {
  if (mpi_is_finalized()) {
    static_cast<void>(line.release());
    return;
  }
  line->say({});
  const std::shared_ptr<Lines> lines = line->lines_;
  lines->keep(std::move(line));
}

}  // namespace hsgd
