// Nodes, leaders and agreement over MPI.
#include "mpi_comm.hpp"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capi.hpp"
#include "communicator.hpp"
#include "hsgd_mpi.h"
#include "transport_mpi.hpp"
#include "wait.hpp"

namespace hsgd {
namespace {

// More leaders than this per node add messages, not bandwidth.
constexpr int kMostLeaders = 8;
constexpr int kPathBytes = 96;

int rank_in(MPI_Comm comm) {
  int rank = 0;
  check_mpi(PMPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  check_mpi(PMPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

OwnComm split(MPI_Comm comm, int color, int key) {
  MPI_Comm part = MPI_COMM_NULL;
  check_mpi(PMPI_Comm_split(comm, color, key, &part), "MPI_Comm_split");
  return OwnComm(part);
}

void nap(int64_t ns) {
  timespec time{};
  time.tv_nsec = ns;
  ::nanosleep(&time, nullptr);
}

// Throws, unless a late rank is to be waited for: then those that wait say so. MPI does not tell who
// waits, so the ranks 0, 1, 2, 4, 8 and so on speak: few lines, and not all of these ranks are late.
void say_late(MPI_Comm comm, const hsgd_options& options) {
  const std::string late = text(
      "set-up over MPI: not all of %d ranks came within %g s; every rank needs hsgd and "
      "the same HSGD_* settings (Open MPI on several hosts: mpirun -x LD_PRELOAD -x "
      "HSGD_...)",
      size_of(comm), options.timeout_s);
  if (options.late == nullptr) throw Error(HSGD_ERR_TIMEOUT, -1, late);
  const int rank = rank_in(comm);
  if ((rank & (rank - 1)) == 0) {
    options.late((late + "; waiting on (HSGD_TIMEOUT_S makes this an error)").c_str());
  }
}

// Returns when all ranks have come. The first thing to do on a communicator that is not ours: it
// has a deadline, which no blocking call has; it cannot be mistaken for a collective of the program
// where a rank makes that instead; and while it waits, MPI goes on, which others may wait for.
void gather_all(MPI_Comm comm, const hsgd_options& options) {
  constexpr int64_t kLongestNapNs = 1'000'000;
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(PMPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  Deadline deadline(options.timeout_s);
  for (int64_t nap_ns = 1'000;; nap_ns = std::min(2 * nap_ns, kLongestNapNs)) {
    int done = 0;
    check_mpi(PMPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done != 0) return;
    if (deadline.passed()) {
      say_late(comm, options);
      deadline = deadline.renewed(options.timeout_s);
    }
    nap(nap_ns);
  }
}

// Runs `body` and returns what it threw: for agree().
template <class Body>
std::optional<Error> attempt(Body&& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(HSGD_ERR_SYSTEM, -1, error.what());
  }
}

// Everybody learns whether everybody succeeded. `failure` is this rank's, if any; throws it, or
// that of another.
void agree(MPI_Comm world, const std::optional<Error>& failure) {
  struct {
    int code;
    int rank;
  } mine{failure ? -static_cast<int>(failure->code()) : 0, rank_in(world)}, worst{};
  check_mpi(PMPI_Allreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, world), "MPI_Allreduce");
  if (worst.code == 0) return;
  char words[512] = {};
  if (failure) std::snprintf(words, sizeof words, "%s", failure->what());
  check_mpi(PMPI_Bcast(words, sizeof words, MPI_CHAR, worst.rank, world), "MPI_Bcast");
  throw AgreedError(static_cast<hsgd_status>(-worst.code), worst.rank, words);
}

// Ranks with different settings would cut payloads differently: refused on all alike.
void compare_settings(MPI_Comm world, const hsgd_options& options) {
  const uint64_t mine[] = {static_cast<uint64_t>(options.oneshot_bytes),
                           static_cast<uint64_t>(options.chunk_bytes),
                           options.wire_oneshot_bytes,
                           options.wire_chunk_bytes,
                           options.slots,
                           options.nontemporal,
                           options.min_bytes,
                           options.wire_dtype};
  uint64_t first[std::size(mine)];
  std::copy(std::begin(mine), std::end(mine), first);
  check_mpi(PMPI_Bcast(first, std::size(mine), MPI_UINT64_T, 0, world), "MPI_Bcast");
  agree(world, attempt([&] {
          check_options(options);
          if (std::equal(std::begin(mine), std::end(mine), first)) return;
          throw Error(HSGD_ERR_ARGUMENT, rank_in(world),
                      text("set-up: ranks 0 and %d have different HSGD_* settings; use the same on "
                           "all (Open MPI on several hosts: mpirun -x NAME)",
                           rank_in(world)));
        }));
}

// The ranks that share a node, in rank order, and the socket at which they meet.
struct Node {
  OwnComm ranks;
  std::optional<Listener> listener;  // on its first rank
  std::string path;
};

// The first of the candidates opens its door and tells the others where it is. Returns whether this
// rank can reach it. Where something fails the ranks stay together, and agree() tells all.
bool share_door(MPI_Comm candidates, Node* node, std::optional<Error>* failure) {
  const bool first = rank_in(candidates) == 0;
  char path[kPathBytes] = {};
  bool here = true;
  if (first) {
    *failure = attempt([&] {
      node->path = meeting_path(draw_meeting_words());
      node->listener.emplace(node->path);
      std::copy(node->path.begin(), node->path.end(), path);
    });
  }
  check_mpi(PMPI_Bcast(path, kPathBytes, MPI_CHAR, 0, candidates), "MPI_Bcast");
  if (!first && *path != '\0') *failure = attempt([&] { here = reachable(path); });
  node->path = path;
  return here;
}

// MPI says which ranks could share memory; a socket under a random name proves that they do (ranks
// in separate containers of one host, for example, do not). Who cannot reach the first rank forms a
// node of its own with others.
void find_node(MPI_Comm world, Node* node) {
  MPI_Comm shared = MPI_COMM_NULL;
  check_mpi(
      PMPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank_in(world), MPI_INFO_NULL, &shared),
      "MPI_Comm_split_type");
  OwnComm candidates(shared);
  std::optional<Error> failure;
  for (bool here = false; !here;) {
    here = share_door(candidates.get(), node, &failure);
    candidates = split(candidates.get(), here ? 0 : 1, rank_in(candidates.get()));
  }
  node->ranks = std::move(candidates);
  agree(world, failure);
}

Place find_place(MPI_Comm world, MPI_Comm node) {
  Place place;
  place.rank = rank_in(world);
  place.size = size_of(world);
  place.local_rank = rank_in(node);
  place.local_size = size_of(node);
  const OwnComm heads = split(world, place.local_rank == 0 ? 0 : MPI_UNDEFINED, place.rank);
  int numbers[2] = {};
  if (heads.valid()) {
    numbers[0] = rank_in(heads.get());
    numbers[1] = size_of(heads.get());
  }
  check_mpi(PMPI_Bcast(numbers, 2, MPI_INT, 0, node), "MPI_Bcast");
  place.node_rank = numbers[0];
  place.node_count = numbers[1];
  if (place.node_count == 1) return place;
  int least[2] = {place.local_size, 0};
  check_mpi(PMPI_Query_thread(&least[1]), "MPI_Query_thread");
  check_mpi(PMPI_Allreduce(MPI_IN_PLACE, least, 2, MPI_INT, MPI_MIN, world), "MPI_Allreduce");
  place.leaders = std::min(least[0], kMostLeaders);
  if (least[1] < MPI_THREAD_MULTIPLE) {
    place.one_thread =
        "MPI was initialized for less than MPI_THREAD_MULTIPLE on some rank; ask MPI_Init_thread "
        "for it (mpi4py: mpi4py.rc.thread_level = 'multiple' before the import of MPI), or use the "
        "blocking calls";
  }
  place.node_of_rank.resize(static_cast<size_t>(place.size));
  check_mpi(
      PMPI_Allgather(&place.node_rank, 1, MPI_INT, place.node_of_rank.data(), 1, MPI_INT, world),
      "MPI_Allgather");
  return place;
}

void check_usable(MPI_Comm comm) {
  if (!mpi_is_running()) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "MPI is not initialized, or finalized already; call MPI_Init first");
  }
  int inter = 0;
  if (comm != MPI_COMM_NULL) check_mpi(PMPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  if (comm == MPI_COMM_NULL || inter != 0) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "MPI_COMM_NULL or an intercommunicator; give a communicator of one group of ranks");
  }
}

}  // namespace

OwnComm same_ranks(MPI_Comm comm) {
  OwnComm own = split(comm, 0, rank_in(comm));
  check_mpi(PMPI_Comm_set_errhandler(own.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return own;
}

bool mpi_is_running() {
  int initialized = 0;
  PMPI_Initialized(&initialized);
  return initialized != 0 && !mpi_is_finalized();
}

hsgd_comm* create_over(MPI_Comm comm, const hsgd_options& options, bool only_if_shared) {
  check_usable(comm);
  gather_all(comm, options);
  const OwnComm world = same_ranks(comm);
  compare_settings(world.get(), options);
  Node node;
  find_node(world.get(), &node);
  Place place = find_place(world.get(), node.ranks.get());
  if (only_if_shared && place.node_count == place.size) return nullptr;
  agree(world.get(), attempt([&] { check_descriptors(place.local_size); }));
  OwnComm leaders;
  if (place.leaders > 0) {
    const bool leads = place.local_rank < place.leaders;
    leaders = split(world.get(), leads ? place.local_rank : MPI_UNDEFINED, place.node_rank);
  }
  std::unique_ptr<Communicator> communicator;
  agree(world.get(), attempt([&] {
          std::unique_ptr<Transport> transport;
          if (leaders.valid()) transport = make_mpi_transport(std::move(leaders));
          Listener* listener = node.listener ? &*node.listener : nullptr;
          communicator = std::make_unique<Communicator>(node.path, listener, std::move(place),
                                                        std::move(transport), options);
        }));
  return new_comm(std::move(communicator));
}

}  // namespace hsgd

int hsgd_mpi_comm_create(const void* mpi_comm, const hsgd_options* options, hsgd_comm** comm,
                         hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *comm = nullptr;
    *comm = hsgd::create_over(*static_cast<const MPI_Comm*>(mpi_comm), *options, false);
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
