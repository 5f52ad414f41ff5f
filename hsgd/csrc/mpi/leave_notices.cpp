// One receive from any leader, one message to each, and the lines that ended here before they ended
// everywhere.
#include "mpi/leave_notices.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace hsgd {
namespace {

constexpr int kPartingTag = 15;  // apart from all of Channel

}  // namespace

// Lines that were given up here and not by all others yet.
class EndedLines {
 public:
  void keep(std::unique_ptr<PartingLine> line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_) return drop(std::move(line));
    lines_.push_back(std::move(line));
    drop_finished();
  }

  void look() {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_finished();
  }

  // In MPI_Finalize: no communicator comes after it, so late messages cannot be mistaken.
  void finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finishing_ = true;
    for (auto& line : lines_) drop(std::move(line));
    lines_.clear();
  }

 private:
  static void drop(std::unique_ptr<PartingLine> line) {
    if (!line->is_sent()) static_cast<void>(line.release());  // MPI may still read from it
  }

  void drop_finished() {
    lines_.erase(std::remove_if(lines_.begin(), lines_.end(),
                                [](const auto& line) { return line->is_over(); }),
                 lines_.end());
  }

  std::mutex mutex_;  // guards all below
  std::vector<std::unique_ptr<PartingLine>> lines_;
  bool finishing_ = false;
};

namespace {

// Those of this process. Lines hold them, too: they may end when MPI has destroyed this.
struct ThisProcess {
  std::shared_ptr<EndedLines> ended = std::make_shared<EndedLines>();
  ~ThisProcess() { ended->finish(); }
};

std::shared_ptr<EndedLines> ended_lines() {
  const auto* process = UntilFinalize<ThisProcess>::get();
  return process != nullptr ? process->ended : std::make_shared<EndedLines>();
}

}  // namespace

PartingLine::PartingLine(Line leaders) : ended_(ended_lines()), leaders_(std::move(leaders)) {
  ended_->look();
  sends_.reserve(leaders_.ranks.size());
  check_mpi(listen(), "MPI_Irecv");
}

PartingLine::~PartingLine() {
  if (receive_ == MPI_REQUEST_NULL || mpi_is_finalized()) return;
  PMPI_Cancel(&receive_);
  PMPI_Wait(&receive_, MPI_STATUS_IGNORE);
}

// One receive at a time, posted long before the message comes.
int PartingLine::listen() {
  if (heard_ == size() - 1) return MPI_SUCCESS;
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
  is_sent();  // has MPI make progress
}

bool PartingLine::hear(Parting* parting) {
  if (receive_ == MPI_REQUEST_NULL) return false;
  int flag = 0;
  check_mpi(PMPI_Test(&receive_, &flag, MPI_STATUS_IGNORE), "MPI_Test");
  if (flag == 0) return false;
  *parting = in_;
  parting->line[sizeof parting->line - 1] = '\0';
  ++heard_;
  broken_ = listen() != MPI_SUCCESS;  // what was heard counts all the same
  return true;
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
  return !broken_ && heard_ == size() - 1 && is_sent();
}

void PartingLine::end(std::unique_ptr<PartingLine> line) noexcept {
  if (mpi_is_finalized()) {
    static_cast<void>(line.release());
    return;
  }
  line->say({});
  const std::shared_ptr<EndedLines> ended = line->ended_;
  ended->keep(std::move(line));
}

}  // namespace hsgd
