// How leaders tell one another over MPI that they take part in no more collectives.
//
// Owns, with others, the leaders' communicator, and the question when that may be freed. MPI gives
// its number to a later communicator, and a message that came here after the end would turn up
// there, or take another's place in the order of messages (Open MPI's ob1; MPICH's issues 2096 and
// 6184). So each leader parts from each other exactly once, and a line goes when it has heard from
// all; until then it stays, and nobody waits for it. Only MPI_Finalize does, which waits for all
// ranks anyway: what lies unread when Open MPI closes a connection over TCP resets that, and ends
// the other rank by SIGPIPE. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_
#define HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_

#include <mpi.h>

#include <memory>
#include <vector>

#include "network/mpi/handle.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

class Lines;

// Leaders of which each node has one, in a communicator that others have, too.
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

  // As Transport::part() and Transport::heard().
  void say(const Parting& parting) noexcept;
  // Throws where MPI failed, and hears what still comes the next time.
  bool hear(Parting* parting);
  // Whether the leader of this rank has parted: what becomes of it then is its own affair.
  bool has_parted(int rank) const;

  // Gives the line up, without waiting: it goes when all have parted, or in MPI_Finalize.
  static void end(std::unique_ptr<PartingLine> line) noexcept;

 private:
  friend class Lines;

  bool has_heard_all() const { return static_cast<int>(parted_.size()) == size() - 1; }
  int listen();
  bool is_sent() noexcept;
  bool is_over() noexcept;

  std::shared_ptr<Lines> lines_;  // all of this process
  Line leaders_;
  std::vector<int> parted_;  // leaders of nodes that have, each once
  bool said_ = false;
  bool kept_ = false;    // by `lines_`
  bool broken_ = false;  // MPI failed, as when a node died: more cannot be heard
  Parting in_;
  Parting out_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::vector<MPI_Request> sends_;
};

// Objects made by UntilFinalize after the first call of this are destroyed before lines are waited
// for: those that end lines.
void expect_lines();

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_LEAVE_NOTICES_HPP_
