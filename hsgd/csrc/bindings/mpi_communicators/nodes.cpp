// find_nodes(): in rounds, one candidate opens a door and the others try to reach it.
#include "bindings/mpi_communicators/nodes.hpp"

#include <limits.h>
#include <unistd.h>

#include <fstream>
#include <unordered_map>
#include <utility>

#include "bindings/mpi_communicators/agreement.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

// The data that a rank sends to all others.
struct Candidacy {
  uint64_t candidates;  // ranks with the same number may share a node
  uint64_t word;        // part of the name of its door, if it opens one
};

// Returns an FNV-1a hash (Fowler, Noll, Vo). Two numbers that are equal by chance cost one round.
uint64_t fold(const std::string& words, uint64_t start = 0xcbf29ce484222325) {
  uint64_t folded = start;
  for (const char c : words) folded = (folded ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return folded;
}

struct HostName {
  char text[HOST_NAME_MAX + 1];
};

HostName own_host() {
  HostName host{};
  if (::gethostname(host.text, sizeof host.text - 1) != 0) host.text[0] = '\0';
  return host;
}

// Identifies this kernel. A file that is unreadable here, as in sandboxes, is unreadable for the
// other ranks of the node, too.
uint64_t own_kernel() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char network[64] = {};
  if (::readlink("/proc/self/ns/net", network, sizeof network - 1) < 0) network[0] = '\0';
  return fold(boot + ' ' + network + ' ' + own_host().text);
}

std::vector<int> ranks_with(const std::vector<Candidacy>& rows, uint64_t candidates) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank].candidates == candidates) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

// Numbers all nodes.
void number_nodes(const std::vector<Candidacy>& rows, Nodes* nodes) {
  std::unordered_map<uint64_t, int> numbers;
  for (const Candidacy& row : rows) {
    nodes->node_of_rank.push_back(
        numbers.emplace(row.candidates, static_cast<int>(numbers.size())).first->second);
  }
  nodes->count = static_cast<int>(numbers.size());
}

// Runs one round for the ranks without a node. The first candidate opens a door; returns true if
// this rank can reach it.
bool try_candidates(Steps& steps, const std::vector<Candidacy>& rows, bool searches,
                    MeetingWords words, Nodes* nodes) {
  const int rank = steps.rank();
  const bool opens = searches && nodes->ranks.size() > 1 && nodes->ranks[0] == rank;
  if (searches) {
    words[0] = rows[static_cast<size_t>(nodes->ranks[0])].word;
    nodes->path = meeting_path(words);
  }
  agree_on(steps, "opened the sockets of their nodes", [&] {
    if (!opens) return;
    nodes->listener = std::make_unique<Listener>(nodes->path);
    HSGD_FAULT_POINT("over MPI: door open");
  });
  bool here = true;
  agree_on(steps, "looked for their nodes", [&] {
    if (searches && nodes->ranks[0] != rank) here = reachable(nodes->path);
  });
  return here;
}

}  // namespace

// Finds the nodes. Ranks that cannot reach the first of their candidates become candidates for
// another node. In each round the first candidates are done, so the rounds end.
Nodes find_nodes(Steps& steps, const MeetingWords& words) {
  Nodes nodes;
  std::vector<Candidacy> rows(static_cast<size_t>(steps.size()));
  Candidacy own{own_kernel(), draw_meeting_words()[0]};
  for (bool here = false;;) {
    steps.gather(&own, rows.data(), sizeof own, "exchanged the identities of their hosts");
    const bool searches = !here;
    if (searches) nodes.ranks = ranks_with(rows, own.candidates);
    here = try_candidates(steps, rows, searches, words, &nodes);
    if (steps.greatest(here ? 0 : 1, "found their nodes") == 0) break;
    if (!here) own = {fold("elsewhere", own.candidates), draw_meeting_words()[0]};
  }
  nodes.ranks = ranks_with(rows, own.candidates);
  number_nodes(rows, &nodes);
  return nodes;
}

std::string find_hosts(Steps& steps, const Nodes& nodes) {
  if (nodes.count == 1 || nodes.ranks[0] != steps.rank()) return "";
  std::vector<int> firsts;
  for (size_t rank = 0; rank < nodes.node_of_rank.size(); ++rank) {
    const bool is_first = nodes.node_of_rank[rank] == static_cast<int>(firsts.size());
    if (is_first) firsts.push_back(static_cast<int>(rank));
  }
  std::vector<HostName> names(firsts.size());
  const HostName own = own_host();
  steps.gather_among(firsts, &own, names.data(), sizeof own, "exchanged the names of their hosts");
  std::string hosts;
  for (const HostName& name : names) hosts += std::string(hosts.empty() ? "" : ",") + name.text;
  return hosts;
}

}  // namespace hsgd
