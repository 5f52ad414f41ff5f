// split(): exchanges colors and readiness before the ranks meet.
#include "collectives/queue/split.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/status.hpp"
#include "node/rendezvous/bootstrap.hpp"

namespace hsgd {
namespace {

// The color and key of a rank. Each rank fills only its own row of a table, and an allreduce sums
// the tables.
struct Choice {
  int64_t color;
  int64_t key;
};
struct Readiness {
  int64_t code;     // hsgd_status: whether the rank can take part
  char words[184];  // the reason why it cannot, or the meeting path of the first rank of its color
};

// Returns the rows of all ranks.
template <class Row>
std::vector<Row> gather(Communicator& whole, const Row& own, const char* name) {
  const hsgd_topology topology = whole.topology();
  std::vector<Row> rows(static_cast<size_t>(topology.size), Row{});
  rows[static_cast<size_t>(topology.rank)] = own;
  const hsgd_label label{name, nullptr, 0};
  whole.allreduce(rows.data(), rows.data(), rows.size() * sizeof(Row), HSGD_UINT8, HSGD_SUM,
                  &label);
  return rows;
}

// Returns the ranks of one color by key, then rank.
std::vector<int> members_of(const std::vector<Choice>& choices, int64_t color) {
  std::vector<int> members;
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    if (choices[rank].color == color) members.push_back(static_cast<int>(rank));
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return choices[static_cast<size_t>(a)].key < choices[static_cast<size_t>(b)].key;
  });
  return members;
}

// All members have reported that they are ready: one that does not come has died since.
class MembersWatch final : public Watch {
 public:
  MembersWatch(const Communicator& whole, const std::vector<int>& members)
      : whole_(whole), members_(members) {}
  void check() override {
    for (const int member : members_) whole_.check_alive(member, "split");
  }

 private:
  const Communicator& whole_;
  const std::vector<int>& members_;
};

}  // namespace

std::unique_ptr<Communicator> split(Communicator& whole, int color, int key,
                                    const int32_t* rank_names) {
  const hsgd_topology topology = whole.topology();
  if (topology.node_count > 1) {
    throw_invalid("split: this communicator spans several nodes; split its MPI communicator");
  }
  const std::vector<Choice> choices = gather(whole, Choice{color, key}, "split");
  const bool takes_part = color >= 0;
  const std::vector<int> members =
      takes_part ? members_of(choices, color) : std::vector<int>{topology.rank};

  std::optional<Listener> listener;
  Readiness own{};
  hsgd_error error;
  own.code = guarded(&error, [&] {
    if (!takes_part) return;
    check_descriptors(kDescriptorsPerRank * members.size());
    if (members[0] != topology.rank) return;
    const std::string path = meeting_path(draw_meeting_words());
    listener.emplace(path);
    path.copy(own.words, sizeof own.words - 1);
  });
  if (own.code != HSGD_OK) std::snprintf(own.words, sizeof own.words, "%.180s", error.message);
  const std::vector<Readiness> ready = gather(whole, own, "split, where to meet");
  if (!takes_part) return nullptr;

  for (const int member : members) {
    const Readiness& row = ready[static_cast<size_t>(member)];
    if (row.code == HSGD_OK) continue;
    const int name = whole.place().names.of(member);
    throw_error(static_cast<hsgd_status>(row.code), name, "split: rank %d cannot take part: %s",
                name, row.words);
  }
  MembersWatch watch(whole, members);
  hsgd_options options = whole.options();
  options.rank_names = rank_names;
  Place place;
  const auto here = std::find(members.begin(), members.end(), topology.rank);
  place.rank = place.local_rank = static_cast<int>(here - members.begin());
  place.size = place.local_size = static_cast<int>(members.size());
  return std::make_unique<Communicator>(ready[static_cast<size_t>(members[0])].words,
                                        listener ? &*listener : nullptr, std::move(place), nullptr,
                                        options, &watch);
}

}  // namespace hsgd
