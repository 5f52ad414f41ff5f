// Sets up a node's segments; primitives of collectives within a node.
#include "node/segments/node_group.hpp"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/first_count.hpp"
#include "core/os/process_life.hpp"
#include "core/topology/cpu_topology.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "this node";
  return name;
}

std::byte* payload_of(CellHeader& cell, size_t bytes) {
  return bytes <= CellHeader::kInlineBytes ? cell.payload
                                           : reinterpret_cast<std::byte*>(&cell) + kLine;
}

// Ranks that share cores do not spin: the rank that they wait for may need their core.
WaitPolicy policy_for(const LocalGroup::Settings& settings, int cores) {
  WaitPolicy policy = settings.wait;
  if (policy.spin < 0) policy.spin = settings.size <= cores ? WaitPolicy{}.spin : 0;
  policy.may_stay_awake = settings.size <= cores;
  // Time until all ranks that share a core have had their turn and copied something. A yielding
  // rank takes no core from another, and a sleep with a wake-up costs more than a turn.
  constexpr int64_t kLeastNs = 200'000;
  constexpr int64_t kTurnNs = 8'000;
  if (settings.size > cores) policy.yield_ns = std::max(kLeastNs, kTurnNs * settings.size / cores);
  return policy;
}

// Spreads the slots over the memory of all NUMA nodes that have ranks.
SharedSlots shared_slots(const LocalGroup::Settings& settings) {
  if (!settings.one_out_ring || numa_nodes_with_cpus() == 1) return {};
  const SegmentLayout& layout = settings.layout;
  return {layout.out_slot(0), layout.out_bytes(), layout.slots()};
}

bool counts(const LocalGroup::Settings& settings) {
  return settings.size > settings.flat_ranks && settings.layout.slots() <= LocalGroup::kMostSlots;
}

// Relaxed: no other rank has the memory yet.
void begin_counts(Control* own) {
  own->bell.rings.store(first_count_32(), std::memory_order_relaxed);
  own->looks.store(first_count_32(), std::memory_order_relaxed);
  own->claimed.store(first_count(), std::memory_order_relaxed);
  own->finished.store(first_count(), std::memory_order_relaxed);
  begin_counts(&own->tree, first_count());
}

void write_failure(Control& control, const Error& error, uint64_t first_missed) {
  Failure& failure = control.failure;
  if (failure.code.load(std::memory_order_relaxed) != 0) return;  // another rank may be reading it
  failure.rank = error.rank();
  failure.first_missed = first_missed;
  std::strncpy(failure.message, error.what(), sizeof failure.message - 1);
  failure.code.store(error.code(), std::memory_order_release);  // partner: check_peers()
}

}  // namespace

LocalGroup::LocalGroup(const std::string& path, Listener* listener, const Settings& settings,
                       const Deadline& deadline)
    : settings_(settings),
      node_name_(host_name()),
      memory_(settings.rank, settings.size, settings.layout.bytes(true),
              settings.layout.bytes(!settings.one_out_ring), shared_slots(settings)),
      peers_(meet_peers(path, listener, deadline)),
      cores_(cores_of_node()),
      policy_(policy_for(settings, cores_)),
      groups_(make_groups()),
      tree_(make_tree()),
      bells_(bells()),
      waiter_(own_bell(), policy_),
      claims_base_(first_count()) {}

RankGroups LocalGroup::make_groups() const {
  std::vector<CpuPlace> places;
  for (int peer = 0; peer < size(); ++peer) places.push_back(control(peer).place);
  RankGroups all{std::vector<int>(static_cast<size_t>(size()))};
  std::iota(all[0].begin(), all[0].end(), 0);
  if (!counts(settings_)) return all;
  size_t root = 1;
  while (root * root < places.size()) ++root;
  return rank_groups(places, size() > kMostGroup ? 0 : root);
}

std::optional<CombiningTree> LocalGroup::make_tree() const {
  if (groups_.size() == 1) return std::nullopt;
  std::vector<TreeNode*> nodes;
  for (const std::vector<int>& group : groups_) nodes.push_back(&control(group.front()).tree);
  return CombiningTree(groups_, std::move(nodes), rank());
}

std::vector<Doorbell*> LocalGroup::bells() const {
  std::vector<Doorbell*> bells;
  for (const std::vector<int>& group : groups_) bells.push_back(&control(group.front()).bell);
  return bells;
}

Doorbell& LocalGroup::own_bell() const {
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (std::find(groups_[i].begin(), groups_[i].end(), rank()) != groups_[i].end())
      return *bells_[i];
  }
  HSGD_CHECK(!"each rank is in a group");
  std::abort();
}

int LocalGroup::cores_of_node() const {
  Cores all = control(0).cores;
  for (int peer = 1; peer < size(); ++peer) add_cores(&all, control(peer).cores);
  return count_cores(all);
}

std::vector<LocalGroup::Peer> LocalGroup::meet_peers(const std::string& path, Listener* listener,
                                                     const Deadline& deadline) {
  constexpr size_t kSmall = 32 << 20;  // with more ranks most pages of others are used by few
  Member self;
  self.pid = ::getpid();
  self.settings = settings_.fingerprint;
  self.process = own_life();
  // The memory is zero, and so are its atomics; zero is the correct first value of every field.
  const MeetingFile file =
      memory_.bring("lower HSGD_SLOTS or HSGD_CHUNK_BYTES", std::nullopt, [this] {
        auto* own = new (base(rank())) Control{};
        own->cores = own_cores();
        begin_counts(own);
        if (rank() == 0) draw_random(&own->id, sizeof own->id);
        if (counts(settings_)) own->place = place_of(own->cores);
        HSGD_FAULT_POINT("set-up: segment made");
      });
  try {
    std::vector<Member> members =
        meet(path, listener, rank(), settings_.names, std::move(self), file, deadline);
    memory_.complete(kSmall);
    std::vector<Peer> peers(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      peers[i].pid = members[i].pid;
      peers[i].name = members[i].name;
      peers[i].process = settings_.processes->add(std::move(members[i].process), members[i].pid);
    }
    HSGD_FAULT_POINT("set-up: mapped");
    return peers;
  } catch (const Error& error) {  // the others may have come already, and would wait
    const Error others = for_others(error, names()[static_cast<size_t>(rank())]);
    if (memory_.is_mapped()) write_failure(control(rank()), others, 0);
    throw;
  }
}

LocalGroup::~LocalGroup() {
  HSGD_FAULT_POINT("close: begun");
  // Partners: has_left(), check_peers() and fail_if_dead(). Their acquire makes `leaving` visible.
  control(rank()).closed.store(1, std::memory_order_seq_cst);
  HSGD_FAULT_POINT("close: marked");
  wake_all();
}

void LocalGroup::wake_all() { wake(INT_MAX); }

void LocalGroup::wake(int most) {
  for (Doorbell* bell : bells_) {
    if (most > 0) most -= ring(*bell, most);
  }
}

bool LocalGroup::somebody_sleeps() const {
  return std::any_of(bells_.begin(), bells_.end(), [](const Doorbell* bell) {
    return bell->asleep.load(std::memory_order_seq_cst) != 0;  // partner: Waiter::sleep_once()
  });
}

bool LocalGroup::open(uint64_t sequence, const Signature& signature, const hsgd_label* label,
                      const void* payload, size_t bytes, const Counts& counts, uint64_t cost,
                      bool stop) {
  CellHeader& own = cell(rank(), sequence);
  fill_label(label, counts, &control(rank()).labels[sequence % kCells]);
  const bool is_inline = bytes <= CellHeader::kInlineBytes;
  std::byte small[CellHeader::kInlineBytes] = {};
  if (payload != nullptr && bytes > 0)
    std::memcpy(is_inline ? small : payload_of(own, bytes), payload, bytes);
  // Writes all fields of the line that peers poll together: otherwise the line would travel to them
  // and back in between.
  own.signature = signature;
  own.note = cost | (stop ? CellHeader::kStop : 0);
  if (payload != nullptr && is_inline) std::memcpy(own.payload, small, sizeof small);
  // Partner: is_open(). A peer that sees the sequence sees payload and signature. Sequentially
  // consistent because ring() must not read `asleep` before the store is visible.
  own.sequence.store(sequence, std::memory_order_seq_cst);
  if (tree_) return count_opened(sequence);
  if (somebody_sleeps() && all_are_open(sequence)) wake_all();
  return false;
}

// Returns true if all ranks have opened it. Of ranks that open it at the same time, at least one
// sees all: the fence orders each rank's store before its looks.
bool LocalGroup::all_are_open(uint64_t sequence) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer) {
    if (!is_open(peer, sequence)) return false;
  }
  return true;
}

// Counts this rank. The last rank of a group compares the headers of its group; the last rank of
// all compares those of the groups.
bool LocalGroup::count_opened(uint64_t sequence) {
  if (!tree_->count_rank(Track::kOpened, sequence)) return false;
  HSGD_FAULT_POINT("header: counted, group not counted");
  compare_headers(tree_->members(), sequence);
  if (!tree_->count_group(Track::kOpened, sequence)) return false;
  compare_headers(tree_->firsts(), sequence);
  return true;
}

// Writes are relaxed: the counting that follows publishes them. A group may write flags of the next
// collective while other ranks still read those of this one: so `differ` has an entry for each
// cell, and `stop` is set once, to the first collective.
void LocalGroup::compare_headers(const std::vector<int>& ranks, uint64_t sequence) {
  const CellHeader& first = cell(ranks.front(), sequence);
  bool differ = false;
  uint64_t notes = 0;
  for (const int rank : ranks) {
    const CellHeader& header = cell(rank, sequence);
    differ = differ || !(header.signature == first.signature);
    notes |= header.note;
  }
  if (differ) control(0).differ[sequence % kCells].store(sequence, std::memory_order_relaxed);
  uint64_t none = 0;
  if ((notes & CellHeader::kStop) != 0)
    control(0).stop.compare_exchange_strong(none, sequence, std::memory_order_relaxed);
}

bool LocalGroup::differ(uint64_t sequence) const {  // see all_opened()
  return control(0).differ[sequence % kCells].load(std::memory_order_relaxed) == sequence;
}

bool LocalGroup::stops(uint64_t sequence) const {
  if (tree_) {
    const uint64_t first = control(0).stop.load(std::memory_order_relaxed);
    return first != 0 && first <= sequence;
  }
  uint64_t notes = 0;
  for (int rank = 0; rank < size(); ++rank) notes |= cell(rank, sequence).note;
  return (notes & CellHeader::kStop) != 0;
}

void LocalGroup::tell_opened(uint64_t sequence) {
  HSGD_FAULT_POINT("header: all counted, not told");
  tree_->reach(Track::kOpened, sequence);
  wake_all();
}

bool LocalGroup::is_open(int rank, uint64_t sequence) const {
  // Partner: open(). A reused cell holds this sequence or an older one, never a later one (see
  // kCells).
  return cell(rank, sequence).sequence.load(std::memory_order_acquire) == sequence;
}

const Signature& LocalGroup::signature(int rank, uint64_t sequence) const {
  return cell(rank, sequence).signature;
}

const std::byte* LocalGroup::payload(int rank, uint64_t sequence, size_t bytes) const {
  return payload_of(cell(rank, sequence), bytes);
}

Call LocalGroup::call(int rank, uint64_t sequence) const {
  return Call{name(rank), signature(rank, sequence), control(rank).labels[sequence % kCells]};
}

std::byte* LocalGroup::result_payload(uint64_t sequence, size_t bytes) {
  return payload_of(result(sequence), bytes);
}

void LocalGroup::publish_result(uint64_t sequence, hsgd_status status, bool stop) {
  CellHeader& cell = result(sequence);
  cell.note = static_cast<uint32_t>(status) | (stop ? CellHeader::kStop : 0);
  // Partner: has_result(), for the same reasons as in open().
  cell.sequence.store(sequence, std::memory_order_seq_cst);
  wake_all();
}

bool LocalGroup::has_result(uint64_t sequence) const {
  return result(sequence).sequence.load(std::memory_order_acquire) == sequence;
}

hsgd_status LocalGroup::result_status(uint64_t sequence) const {
  return static_cast<hsgd_status>(static_cast<int32_t>(result(sequence).note));
}

bool LocalGroup::result_stops(uint64_t sequence) const {
  return (result(sequence).note & CellHeader::kStop) != 0;
}

Call (&LocalGroup::mismatch())[2] { return control(0).mismatch; }

void LocalGroup::publish(std::atomic<uint64_t> Progress::* member, uint64_t value,
                         Audience audience) {
  // Partners: the acquire loads of progress() by peers. A peer that sees the counter sees the data
  // that it counts. Sequentially consistent because ring() needs it.
  (control(rank()).progress.*member).store(value, std::memory_order_seq_cst);
  const bool last = member != &Progress::exchanged && count_step(member, value);
  if (last || audience == Audience::kEach) wake(audience == Audience::kSome ? cores() : INT_MAX);
}

// Returns true if this rank was the last to reach the step, and a rank may sleep.
bool LocalGroup::count_step(std::atomic<uint64_t> Progress::* member, uint64_t steps) {
  if (!tree_) {
    if (!somebody_sleeps()) return false;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // as in all_are_open()
    return peers_reached(member, steps);
  }
  const Track track = track_of(member);
  uint64_t& counted = counted_[static_cast<size_t>(track)];
  if (steps == counted) return false;  // already counted
  counted = steps;
  if (!tree_->count_rank(track, steps) || !tree_->count_group(track, steps)) return false;
  tree_->reach(track, steps);
  return true;
}

void LocalGroup::appoint_meeting() {
  HSGD_CHECK(rank() == 0);
  const MeetingWords words = draw_meeting_words();
  std::copy(words.begin(), words.end(), control(0).meeting);
}

std::string LocalGroup::next_meeting() const {
  MeetingWords words{};
  std::copy_n(control(0).meeting, words.size(), words.begin());
  return meeting_path(words);
}

std::optional<uint64_t> LocalGroup::claim(uint64_t parts) {
  std::atomic<uint64_t>& claimed = control(0).claimed;
  uint64_t next = claimed.load(std::memory_order_relaxed);
  while (next < claims_base_ + parts) {
    // Relaxed: the headers published the input of each part before any rank claims one.
    if (claimed.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) {
      return next - claims_base_;
    }
  }
  return std::nullopt;
}

void LocalGroup::finish_claim(uint64_t parts) {
  // Partner: claims_finished(). Releases the results of this part. Sequentially consistent because
  // ring() needs it.
  const uint64_t before = control(0).finished.fetch_add(1, std::memory_order_seq_cst);
  if (before + 1 == claims_base_ + parts) wake_all();
}

bool LocalGroup::claims_finished(uint64_t parts) const {
  return control(0).finished.load(std::memory_order_acquire) >= claims_base_ + parts;
}

void LocalGroup::fail(const Error& error, uint64_t first_missed) {
  write_failure(control(rank()), error, first_missed);
  wake_all();
}

}  // namespace hsgd
