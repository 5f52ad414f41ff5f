// create_over(): the ranks meet, compare their settings, find their nodes, and connect there.
#include "bindings/mpi_communicators/comm.hpp"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/handles.hpp"
#include "bindings/mpi_communicators/nodes.hpp"
#include "bindings/mpi_communicators/steps.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/status.hpp"
#include "core/status/status_note.hpp"
#include "hsgd_mpi.h"
#include "network/mpi/progress.hpp"
#include "network/mpi/threads.hpp"
#include "network/mpi/transport.hpp"

namespace hsgd {
namespace {

constexpr const char* kMeet = "connected within their nodes";

// The first message of rank 0 to all others.
struct FirstWords {
  uint64_t settings[10];
  KnownTuning known;
  MeetingWords meeting;
};

// Compares the settings of all ranks: different ones would cut payloads differently, and all ranks
// refuse them.
FirstWords compare_settings(Steps& steps, const hsgd_options& options, const KnownTuning& known) {
  const FirstWords own{
      {static_cast<uint64_t>(options.oneshot_bytes), static_cast<uint64_t>(options.chunk_bytes),
       options.wire_oneshot_bytes, options.wire_chunk_bytes, options.slots, options.nontemporal,
       options.min_bytes, options.wire_dtype, options.wire_radix, options.flat_ranks},
      known,
      draw_meeting_words()};
  FirstWords first = own;
  steps.broadcast(&first, sizeof first, 0, "received the settings of rank 0");
  agree_on(steps, "compared their settings", [&] {
    check_options(options);
    if (std::equal(std::begin(own.settings), std::end(own.settings), first.settings)) return;
    const int name = steps.names().of(steps.rank());
    throw_error(HSGD_ERR_ARGUMENT, name,
                "set-up: ranks %d and %d have different HSGD_* settings; use the same on "
                "all (Open MPI on several hosts: mpirun -x NAME)",
                steps.names().of(0), name);
  });
  return first;
}

// Applies the measurements of rank 0. Threads that create communicators of the same ranks at once
// finish in a different order on each rank, so that ranks may know different measurements. Those of
// rank 0 count, also for the kind of store, which must be equal on all ranks of a node
// (collectives/context/store_tuner.hpp).
hsgd_options with_known(hsgd_options options, const KnownTuning& first) {
  if (first.store == 0) return options;
  options.known_store = static_cast<uint32_t>(first.store);
  if (first.oneshot_bytes >= 0) options.oneshot_bytes = first.oneshot_bytes;
  if (first.chunk_bytes >= 0) options.chunk_bytes = first.chunk_bytes;
  options.known_allreduce_bytes = first.allreduce_bytes;
  return options;
}

// Records limits on threads. `level`: the lowest MPI thread level of all ranks.
void note_threads(int level, Wanted wanted, Place* place) {
  if (level >= MPI_THREAD_MULTIPLE) return;
  place->one_thread =
      "MPI was initialized for less than MPI_THREAD_MULTIPLE on some rank; ask MPI_Init_thread "
      "for it (mpi4py: mpi4py.rc.thread_level = 'multiple' before the import of MPI), or use the "
      "blocking calls";
  // The program's own MPI calls come from the permitted thread.
  if (level >= MPI_THREAD_SERIALIZED || wanted == Wanted::kBehindMpi) return;
  place->is_foreign_thread = is_foreign_thread;
  place->why_foreign = kForeignThread;
}

// The data that a rank sends to all others if there are several nodes.
struct Circumstances {
  int32_t thread_level;
  int32_t nic;
};

// The role of a rank between nodes, and the ranks that it exchanges with, by node.
struct Lead {
  Place place;
  std::vector<int> ranks;
};

Lead find_place(Steps& steps, const Nodes& nodes, const hsgd_options& options, Wanted wanted) {
  if (nodes.count == 1) return {place_on(nodes.node_of_rank, steps.rank()), {}};
  const Circumstances own{thread_level(), hsgd_near_nic(&options)};
  std::vector<Circumstances> rows(static_cast<size_t>(steps.size()));
  steps.gather(&own, rows.data(), sizeof own, "exchanged their thread level and network adapter");
  int level = MPI_THREAD_MULTIPLE;
  std::vector<int> nic_of_rank;
  for (const Circumstances& row : rows) {
    static_assert(MPI_THREAD_MULTIPLE > MPI_THREAD_SINGLE, "levels rise");
    level = std::min(level, static_cast<int>(row.thread_level));
    nic_of_rank.push_back(row.nic);
  }
  Lead lead{place_on(nodes.node_of_rank, steps.rank(), nic_of_rank), {}};
  note_threads(level, wanted, &lead.place);
  if (lead.place.lane >= 0) {
    lead.ranks = leaders_of(nodes.node_of_rank, nic_of_rank)[static_cast<size_t>(lead.place.lane)];
  }
  return lead;
}

void check_usable(MPI_Comm comm, Wanted wanted) {
  if (!mpi_is_running()) {
    throw_invalid("MPI is not initialized, or finalized already; call MPI_Init first");
  }
  if (wanted == Wanted::kByName && is_foreign_thread()) {
    throw Error(HSGD_ERR_SYSTEM, -1, std::string("set-up over MPI: ") + kForeignThread);
  }
  int inter = 0;
  if (comm != MPI_COMM_NULL) check_mpi(PMPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  if (comm == MPI_COMM_NULL || inter != 0) {
    throw_invalid(
        "MPI_COMM_NULL or an intercommunicator; give a communicator of one group of ranks");
  }
}

// Creates a communicator with MPI_Comm_split. Not MPI_Comm_idup, which calls the copy functions of
// the program's attributes, as no MPI_Allreduce does. MPI has no other nonblocking call that
// creates a communicator.
OwnComm split_off(MPI_Comm comm, int rank) {
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(PMPI_Comm_split(comm, 0, rank, &part), "MPI_Comm_split");
  OwnComm own(part);
  check_mpi(PMPI_Comm_set_errhandler(own.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return own;
}

// Watches ranks that meet on their nodes. A rank that finds a closed door cannot distinguish a dead
// rank from a late one; MPI can.
class MpiWatch final : public Watch {
 public:
  MpiWatch(const Steps& steps, Turn& turn) : steps_(steps), turn_(turn) {}
  void check() override {
    turn_.take_for([&] {
      drive_progress();  // MPI detects deaths only inside its calls
      steps_.check_deaths(kMeet);
    });
  }

 private:
  const Steps& steps_;
  Turn& turn_;
};

// Connects the ranks. Their own communicator serves its leaders; the leaders of one lane form a
// group.
std::unique_ptr<Communicator> meet(const SharedComm& own, Nodes nodes, Lead lead,
                                   const hsgd_options& options, const Steps& steps, Turn& turn) {
  std::unique_ptr<Transport> transport;
  if (!lead.ranks.empty()) {
    transport = make_mpi_transport({own, std::move(lead.ranks), lead.place.node_rank},
                                   lead.place.is_foreign_thread, steps.names());
  }
  MpiWatch watch(steps, turn);
  std::unique_ptr<Communicator> communicator;
  turn.leave_for([&] {
    communicator =
        std::make_unique<Communicator>(nodes.path, nodes.listener.get(), std::move(lead.place),
                                       std::move(transport), options, &watch);
  });
  return communicator;
}

hsgd_comm* set_up(const SharedComm& own, const hsgd_options& options, Wanted wanted,
                  const KnownTuning& known, Turn& turn) {
  Steps steps(own->get(), options, turn);
  const FirstWords first = compare_settings(steps, options, known);
  const MeetingWords& words = first.meeting;
  HSGD_FAULT_POINT("over MPI: settings compared");
  Nodes nodes = find_nodes(steps, words);
  HSGD_FAULT_POINT("over MPI: node found");
  if (wanted == Wanted::kBehindMpi && nodes.count == steps.size()) return nullptr;
  Lead lead = find_place(steps, nodes, options, wanted);
  agree_on(steps, "checked their limits of file descriptors", [&] {
    check_descriptors(kDescriptorsPerRank * static_cast<size_t>(lead.place.local_size));
  });
  const std::string hosts = find_hosts(steps, nodes);
  HSGD_FAULT_POINT("over MPI: place found");
  hsgd_options named = with_known(options, first.known);
  named.comm_id = status_id(words.data(), sizeof words);
  std::unique_ptr<Communicator> communicator;
  agree_on(steps, kMeet, [&] {
    communicator = meet(own, std::move(nodes), std::move(lead), named, steps, turn);
    HSGD_FAULT_POINT("over MPI: met");
  });
  communicator->tell_hosts(hosts);
  return new_comm(std::move(communicator));
}

}  // namespace

OwnComm duplicate(MPI_Comm comm, const hsgd_options& options) {
  Turn turn(thread_level() == MPI_THREAD_SERIALIZED);
  return Steps(comm, options, turn).duplicate();
}

bool mpi_is_running() {
  int initialized = 0;
  PMPI_Initialized(&initialized);
  return initialized != 0 && !mpi_is_finalized();
}

hsgd_comm* create_over(MPI_Comm comm, const hsgd_options& options, Wanted wanted,
                       const KnownTuning& known) {
  check_usable(comm, wanted);
  Turn turn(wanted == Wanted::kByName && thread_level() == MPI_THREAD_SERIALIZED);
  const QuietErrors quiet(comm);
  Steps steps(comm, options, turn);
  HSGD_FAULT_POINT("over MPI: begun");
  steps.come();
  HSGD_FAULT_POINT("over MPI: all have come");
  const auto own = std::make_shared<OwnComm>(
      wanted == Wanted::kByName ? steps.duplicate() : split_off(comm, steps.rank()));
  HSGD_FAULT_POINT("over MPI: own communicator made");
  try {
    return set_up(own, options, wanted, known, turn);
  } catch (const AgreedError&) {
    throw;
  } catch (...) {
    new SharedComm(own);  // kept forever: an abandoned step may still be in progress there
    throw;
  }
}

}  // namespace hsgd

int hsgd_mpi_comm_create(const void* mpi_comm, const hsgd_options* options, hsgd_comm** comm,
                         hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *comm = nullptr;
    *comm =
        hsgd::create_over(*static_cast<const MPI_Comm*>(mpi_comm), *options, hsgd::Wanted::kByName);
  });
}

void hsgd_mpi_library_version(char* text, size_t text_bytes) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  PMPI_Get_library_version(version, &length);
  std::string line(version, static_cast<size_t>(length));
  line = line.substr(0, line.find('\n'));
  std::snprintf(text, text_bytes, "%s", line.c_str());
}
