// Transport over MPI point-to-point.
#include "network/mpi/transport.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"
#include "network/mpi/deaths.hpp"
#include "network/mpi/threads.hpp"

namespace hsgd {

namespace {

// MPI may report a leader's death before its last message, which holds the reason, has arrived.
constexpr int64_t kGraceNs = 500'000'000;

class MpiTransport final : public Transport {
 public:
  MpiTransport(Line leaders, bool (*is_foreign_thread)(), const RankNames& names)
      : ranks_(leaders.ranks),
        names_(names),
        line_(std::make_unique<PartingLine>(std::move(leaders))),
        leaders_(line_->comm()),
        is_foreign_thread_(is_foreign_thread),
        takes_turns_(thread_level() == MPI_THREAD_SERIALIZED) {}
  ~MpiTransport() override {
    if (!mpi_is_finalized() && may_not_call()) {
      static_cast<void>(line_.release());  // leaked on purpose
      return;
    }
    const Turn turn(takes_turns_);
    PartingLine::end(std::move(line_));
  }

  int node_rank() const override { return line_->rank(); }
  int node_count() const override { return line_->size(); }

  Ticket send(int node, Channel channel, const void* data, size_t bytes) override {
    const Turn turn(takes_turns_);
    const Ticket ticket = free_ticket({++messages_, node, false});
    check(PMPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, rank_of(node),
                     static_cast<int>(channel), leaders_, &requests_[ticket]),
          "MPI_Isend");
    return ticket;
  }

  Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) override {
    const Turn turn(takes_turns_);
    const Ticket ticket = free_ticket({++messages_, node, true});
    check(PMPI_Irecv(data, static_cast<int>(capacity_bytes), MPI_BYTE, rank_of(node),
                     static_cast<int>(channel), leaders_, &requests_[ticket]),
          "MPI_Irecv");
    return ticket;
  }

  // A test of any request makes MPI ask the network, which over TCP is a system call, and yield the
  // core if told so. So one call tests all requests; a caller that asks for each ticket in turn
  // causes one query.
  bool done(Ticket ticket) override {
    Slot& slot = slots_[ticket];
    if (!slot.complete && !std::exchange(slot.tested, false) && lost_ns_ == 0) {
      const Turn turn(takes_turns_);
      test_all();
      slot.tested = false;
    }
    if (slot.complete) free_.push_back(ticket);
    return slot.complete;
  }

  int awaited_node() const override { return awaited_among(slots_); }
  int leader_of(int node) const override { return names_.of(rank_of(node)); }

  void part(const Parting& parting) noexcept override {
    if (mpi_is_finalized() || may_not_call()) return;
    const Turn turn(takes_turns_);
    line_->say(parting);
  }

  bool heard(Parting* parting) override {
    const Turn turn(takes_turns_);
    try {
      if (line_->hear(parting)) return true;
    } catch (const Error& error) {
      lose(error);
    }
    if (lost_ns_ == 0 || now_ns() - lost_ns_ < kGraceNs || std::exchange(has_told_, true))
      return false;
    *parting = lost_;
    return true;
  }

  bool quiesce(const Deadline& deadline) noexcept override {
    if (mpi_is_finalized()) return true;
    if (may_not_call()) return false;
    Turn turn(takes_turns_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL && slots_[i].order.receives) PMPI_Cancel(&requests_[i]);
    }
    for (;;) {
      bool quiet = true;
      for (MPI_Request& request : requests_) {
        int flag = 1;
        if (request != MPI_REQUEST_NULL &&
            PMPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS)
          flag = request == MPI_REQUEST_NULL ? 1 : 0;  // a request to a dead rank is over, too
        quiet &= flag != 0;
      }
      if (quiet || deadline.passed()) return quiet;
      turn.leave_for([] {});
    }
  }

 private:
  struct Slot {
    bool complete = false;
    bool tested = false;  // found open, since done() was last called for it
    MessageOrder order;
  };

  int rank_of(int node) const { return ranks_[static_cast<size_t>(node)]; }
  bool may_not_call() const { return is_foreign_thread_ != nullptr && is_foreign_thread_(); }

  Ticket free_ticket(const MessageOrder& order) {
    if (free_.empty()) {
      free_.push_back(static_cast<Ticket>(slots_.size()));
      slots_.emplace_back();
      requests_.push_back(MPI_REQUEST_NULL);
      indices_.emplace_back();
      statuses_.emplace_back();
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    slots_[ticket] = {false, false, order};
    return ticket;
  }

  // If MPI reports a dead rank, no more is asked of MPI here, and the other ranks of the node learn
  // of it like of a rank that parts.
  void check(int status, const char* what) {
    try {
      check_mpi(status, what);
    } catch (const Error& error) {
      lose(error);
    }
  }

  // Handles a lost rank. Leaders know more about ranks that do not lead, and report it. So does a
  // leader that gives up: the end of its process is then not the cause.
  void lose(const Error& error) {
    if (error.code() != HSGD_ERR_PEER_LOST) throw error;
    if (lost_ns_ != 0) return;
    const std::vector<int> dead = dead_ranks_of(leaders_);
    const auto found = std::find_if(dead.begin(), dead.end(), [this](int rank) {
      return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end() &&
             !line_->has_parted(rank);
    });
    if (found == dead.end() && !dead.empty()) return;
    lost_ns_ = now_ns();
    const int rank = dead.empty() ? -1 : names_.of(*found);
    const std::string who = rank < 0 ? "a rank" : text("rank %d", rank);
    lost_ = Parting(0, rank, Parting::kClosed,
                    text("%s died or was cut off (%s)", who.c_str(), error.what()));
  }

  void test_all() {
    int count = 0;
    int status = MPI_SUCCESS;
    // Open MPI asks the network after it has looked at the requests: only a second look sees what
    // came.
    for (int look = 0; look < 2 && status == MPI_SUCCESS && count == 0; ++look) {
      status = PMPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                             indices_.data(), statuses_.data());
    }
    const bool some_failed = status == MPI_ERR_IN_STATUS;
    if (!some_failed) check(status, "MPI_Testsome");
    if (!some_failed && status != MPI_SUCCESS) return;
    for (Slot& slot : slots_) slot.tested = true;
    for (size_t i = 0; i < static_cast<size_t>(std::max(count, 0)); ++i) {
      const int error = some_failed ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
      check(error, "MPI_Testsome");
      if (error == MPI_SUCCESS) slots_[static_cast<size_t>(indices_[i])].complete = true;
    }
  }

  std::vector<int> ranks_;  // by node
  RankNames names_;
  std::unique_ptr<PartingLine> line_;
  MPI_Comm leaders_;  // shared with the line
  bool (*is_foreign_thread_)();
  bool takes_turns_;
  std::vector<Slot> slots_;
  uint64_t messages_ = first_count();
  int64_t lost_ns_ = 0;  // time of MPI's first report of a death; 0: none
  bool has_told_ = false;
  Parting lost_;
  std::vector<Ticket> free_;
  std::vector<MPI_Request> requests_;  // of the slots; null if nothing is in flight
  std::vector<int> indices_;           // filled by MPI_Testsome
  std::vector<MPI_Status> statuses_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(Line leaders, bool (*is_foreign_thread)(),
                                              const RankNames& names) {
  return std::make_unique<MpiTransport>(std::move(leaders), is_foreign_thread, names);
}

}  // namespace hsgd
