// The MPI implementation of Transport.
#include "transport_mpi.hpp"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace hsgd {

OwnComm::~OwnComm() {
  if (comm_ == MPI_COMM_NULL) return;
  int finalized = 0;
  PMPI_Finalized(&finalized);
  if (finalized == 0) PMPI_Comm_free(&comm_);
}

void check_mpi(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  PMPI_Error_string(status, words, &length);
  hsgd_status code = HSGD_ERR_SYSTEM;
#ifdef MPIX_ERR_PROC_FAILED  // where the launcher was asked for it, as by mpirun --with-ft ulfm
  int kind = MPI_SUCCESS;
  PMPI_Error_class(status, &kind);
  if (kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_PROC_FAILED_PENDING) {
    code = HSGD_ERR_PEER_LOST;
  }
#endif
  throw Error(code, -1, text("%s failed: %s", what, words));
}

namespace {

constexpr int kPoisonTag = 15;
constexpr size_t kPoisonBytes = 512;

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(OwnComm leaders) : leaders_(std::move(leaders)) {
    PMPI_Comm_set_errhandler(leaders_.get(), MPI_ERRORS_RETURN);
    PMPI_Comm_rank(leaders_.get(), &rank_);
    PMPI_Comm_size(leaders_.get(), &size_);
    check_mpi(PMPI_Irecv(poison_in_, kPoisonBytes, MPI_BYTE, MPI_ANY_SOURCE, kPoisonTag,
                         leaders_.get(), &poison_),
              "MPI_Irecv");
  }

  ~MpiTransport() override {
    int finalized = 0;
    PMPI_Finalized(&finalized);
    if (finalized == 0) cancel(poison_);
  }

  int node_rank() const override { return rank_; }
  int node_count() const override { return size_; }

  Ticket send(int node, Channel channel, const void* data, size_t bytes) override {
    const Ticket ticket = free_ticket(false);
    check_mpi(PMPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, node, static_cast<int>(channel),
                         leaders_.get(), &requests_[ticket]),
              "MPI_Isend");
    return ticket;
  }

  Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) override {
    const Ticket ticket = free_ticket(true);
    check_mpi(PMPI_Irecv(data, static_cast<int>(capacity_bytes), MPI_BYTE, node,
                         static_cast<int>(channel), leaders_.get(), &requests_[ticket]),
              "MPI_Irecv");
    return ticket;
  }

  // Whoever tests a request makes MPI ask the network, which over TCP is a system call, and yield
  // the core where it was told to. So one call tests all of them, and who asks for each in turn has
  // asked the network once.
  bool done(Ticket ticket) override {
    Slot& slot = slots_[ticket];
    if (!slot.complete && !std::exchange(slot.tested, false)) {
      test_all();
      slot.tested = false;
    }
    slot.used = !slot.complete;
    return slot.complete;
  }

  void poison(const std::string& reason) noexcept override {
    if (poisoned_out_) return;
    poisoned_out_ = true;
    std::strncpy(poison_out_, reason.c_str(), kPoisonBytes - 1);
    for (int node = 0; node < size_; ++node) {
      if (node == rank_) continue;
      MPI_Request request = MPI_REQUEST_NULL;
      // The buffer lives as long as this object; nobody waits for a node that may hang.
      if (PMPI_Isend(poison_out_, kPoisonBytes, MPI_BYTE, node, kPoisonTag, leaders_.get(),
                     &request) == MPI_SUCCESS) {
        int flag = 0;
        PMPI_Test(&request, &flag, MPI_STATUS_IGNORE);
        if (flag == 0) PMPI_Request_free(&request);
      }
    }
  }

  bool poisoned(std::string* reason) override {
    if (poison_ != MPI_REQUEST_NULL) {
      int flag = 0;
      check_mpi(PMPI_Test(&poison_, &flag, MPI_STATUS_IGNORE), "MPI_Test");
      if (flag == 0) return false;
    }
    poison_in_[kPoisonBytes - 1] = '\0';
    *reason = poison_in_;
    return true;
  }

  bool quiesce(const Deadline& deadline) noexcept override {
    int finalized = 0;
    PMPI_Finalized(&finalized);
    if (finalized != 0) return true;
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
    }
  }

 private:
  struct Slot {
    bool used = false;
    bool receives = false;
    bool complete = false;
    bool tested = false;  // and found open, since done() was last asked for it
  };

  Ticket free_ticket(bool receives) {
    const auto slot =
        std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.used; });
    const auto ticket = static_cast<Ticket>(slot - slots_.begin());
    if (slot == slots_.end()) {
      slots_.emplace_back();
      requests_.push_back(MPI_REQUEST_NULL);
      indices_.emplace_back();
      statuses_.emplace_back();
    }
    slots_[ticket] = {true, receives, false, false};
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

  static void cancel(MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return;
    PMPI_Cancel(&request);
    PMPI_Wait(&request, MPI_STATUS_IGNORE);
  }

  OwnComm leaders_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<Slot> slots_;
  std::vector<MPI_Request> requests_;  // of the slots; null where nothing is under way
  std::vector<int> indices_;           // what MPI_Testsome fills
  std::vector<MPI_Status> statuses_;
  MPI_Request poison_ = MPI_REQUEST_NULL;
  bool poisoned_out_ = false;
  char poison_in_[kPoisonBytes] = {};
  char poison_out_[kPoisonBytes] = {};
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(OwnComm leaders) {
  return std::make_unique<MpiTransport>(std::move(leaders));
}

}  // namespace hsgd
