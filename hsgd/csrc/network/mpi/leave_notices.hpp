// PartingLine: leaders tell one another over MPI that they take part in no more collectives.
//
// Shares the leaders' communicator with others, and decides when it may be freed. MPI reuses its
// number for a later communicator, and a message that came after the end would arrive there, or
// take another message's place in the order (Open MPI's ob1; MPICH's issues 2096 and 6184). So each
// leader parts from each other exactly once, and a line is freed when it has heard from all; until
// then it stays, and no rank waits for it. Only MPI_Finalize waits, which waits for all ranks
// anyway: if Open MPI closes a TCP connection with unread data, this resets it and ends the other
// rank by SIGPIPE. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_
#define HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_

#include <mpi.h>

#include <memory>
#include <vector>

#include "network/mpi/handle.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

class Lines;

// Leaders, one per node, in a communicator that others use, too.
struct Line {
  SharedComm comm;
  std::vector<int> ranks;  // in `comm`, by node
  int node = 0;            // this rank's
};

class PartingLine {
 public:
  explicit PartingLine(Line leaders);
  ~PartingLine();
  PartingLine(const PartingLine&) = delete;
  PartingLine& operator=(const PartingLine&) = delete;

  MPI_Comm comm() const { return leaders_.comm->get(); }
  int rank() const { return leaders_.node; }
  int size() const { return static_cast<int>(leaders_.ranks.size()); }

  // See Transport::part() and Transport::heard().
  void say(const Parting& parting) noexcept;
  // Throws if MPI failed; the next call returns messages that still come.
  bool hear(Parting* parting);
  // Returns true if the leader with this rank has parted: a later failure of it is no error.
  bool has_parted(int rank) const;

  // Gives the line up without waiting: it is freed when all have parted, or in MPI_Finalize.
  static void end(std::unique_ptr<PartingLine> line) noexcept;

 private:
  friend class Lines;

  bool has_heard_all() const { return static_cast<int>(parted_.size()) == size() - 1; }
  int listen();
  bool is_sent() noexcept;
  bool is_over() noexcept;

  std::shared_ptr<Lines> lines_;  // of this process
  Line leaders_;
  std::vector<int> parted_;  // nodes whose leader has parted, each once
  bool said_ = false;
  bool kept_ = false;    // by `lines_`
  bool broken_ = false;  // MPI failed, as after a death: nothing more can be received
  Parting in_;
  Parting out_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::vector<MPI_Request> sends_;
};

// Call it before UntilFinalize makes objects that end lines: these are then destroyed before
// MPI_Finalize waits for the lines.
void expect_lines();

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_
