// The MPI implementation of Transport.
#include "mpi/transport.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/first_count.hpp"
#include "mpi/threads.hpp"

namespace hsgd {

namespace {

class MpiTransport final : public Transport {
 public:
  MpiTransport(Line leaders, bool (*is_foreign_thread)())
      : ranks_(leaders.ranks),
        line_(std::make_unique<PartingLine>(std::move(leaders))),
        leaders_(line_->comm()),
        is_foreign_thread_(is_foreign_thread),
        takes_turns_(thread_level() == MPI_THREAD_SERIALIZED) {}
  ~MpiTransport() override {
    if (!mpi_is_finalized() && may_not_call()) {
      static_cast<void>(line_.release());  // for good
      return;
    }
    const Turn turn(takes_turns_);
    PartingLine::end(std::move(line_));
  }

  int node_rank() const override { return line_->rank(); }
  int node_count() const override { return line_->size(); }

  Ticket send(int node, Channel channel, const void* data, size_t bytes) override {
    const Turn turn(takes_turns_);
    const Ticket ticket = free_ticket(false);
    check_mpi(PMPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, rank_of(node),
                         static_cast<int>(channel), leaders_, &requests_[ticket]),
              "MPI_Isend");
    return ticket;
  }

  Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) override {
    const Turn turn(takes_turns_);
    const Ticket ticket = free_ticket(true);
    slots_[ticket].order = {++receives_, node};
    check_mpi(PMPI_Irecv(data, static_cast<int>(capacity_bytes), MPI_BYTE, rank_of(node),
                         static_cast<int>(channel), leaders_, &requests_[ticket]),
              "MPI_Irecv");
    return ticket;
  }

  // Whoever tests a request makes MPI ask the network, which over TCP is a system call, and yield
  // the core where it was told to. So one call tests all of them, and who asks for each in turn has
  // asked the network once.
  bool done(Ticket ticket) override {
    Slot& slot = slots_[ticket];
    if (!slot.complete && !std::exchange(slot.tested, false)) {
      const Turn turn(takes_turns_);
      test_all();
      slot.tested = false;
    }
    if (slot.complete) free_.push_back(ticket);
    return slot.complete;
  }

  int awaited_node() const override {
    std::pair<uint64_t, int> first{UINT64_MAX, -1};
    for (const Slot& slot : slots_) {
      if (slot.receives && !slot.complete) first = std::min(first, slot.order);
    }
    return first.second;
  }

  void part(const Parting& parting) noexcept override {
    if (mpi_is_finalized() || may_not_call()) return;
    const Turn turn(takes_turns_);
    line_->say(parting);
  }

  bool heard(Parting* parting) override {
    const Turn turn(takes_turns_);
    return line_->hear(parting);
  }

  bool quiesce(const Deadline& deadline) noexcept override {
    if (mpi_is_finalized()) return true;
    if (may_not_call()) return false;
    Turn turn(takes_turns_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL && slots_[i].receives) PMPI_Cancel(&requests_[i]);
    }
    for (;;) {
      bool quiet = true;
      for (MPI_Request& request : requests_) {
        int flag = 1;
        if (request != MPI_REQUEST_NULL &&
            PMPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS)
          flag = 0;
        quiet &= flag != 0;
      }
      if (quiet || deadline.passed()) return quiet;
      turn.leave_for([] {});
    }
  }

 private:
  struct Slot {
    bool receives = false;
    bool complete = false;
    bool tested = false;               // and found open, since done() was last asked for it
    std::pair<uint64_t, int> order{};  // of a receive: its number, from 1, and from which node
  };

  bool may_not_call() const { return is_foreign_thread_ != nullptr && is_foreign_thread_(); }
  int rank_of(int node) const { return ranks_[static_cast<size_t>(node)]; }

  Ticket free_ticket(bool receives) {
    if (free_.empty()) {
      free_.push_back(static_cast<Ticket>(slots_.size()));
      slots_.emplace_back();
      requests_.push_back(MPI_REQUEST_NULL);
      indices_.emplace_back();
      statuses_.emplace_back();
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    slots_[ticket] = {};
    slots_[ticket].receives = receives;
    return ticket;
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
    for (int i = 0; status == MPI_ERR_IN_STATUS && i < count; ++i) {
      check_mpi(statuses_[static_cast<size_t>(i)].MPI_ERROR, "MPI_Testsome");
    }
    check_mpi(status, "MPI_Testsome");
    for (Slot& slot : slots_) slot.tested = true;
    for (int i = 0; i < count; ++i) {
      slots_[static_cast<size_t>(indices_[static_cast<size_t>(i)])].complete = true;
    }
  }

  std::vector<int> ranks_;  // by node
  std::unique_ptr<PartingLine> line_;
  MPI_Comm leaders_;  // the line's
  bool (*is_foreign_thread_)();
  bool takes_turns_;
  std::vector<Slot> slots_;
  uint64_t receives_ = first_count();
  std::vector<Ticket> free_;
  std::vector<MPI_Request> requests_;  // of the slots; null where nothing is under way
  std::vector<int> indices_;           // what MPI_Testsome fills
  std::vector<MPI_Status> statuses_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(Line leaders, bool (*is_foreign_thread)()) {
  return std::make_unique<MpiTransport>(std::move(leaders), is_foreign_thread);
}

}  // namespace hsgd
