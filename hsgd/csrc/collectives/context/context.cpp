// Context: begins a collective, waits, and fails.
#include "collectives/context/context.hpp"

#include <algorithm>
#include <utility>

#include "collectives/context/process.hpp"
#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/first_count.hpp"
#include "node/segments/survivors.hpp"

namespace hsgd {
namespace {

// Returns an FNV-1a hash over whole words; it changes if any one value changes.
uint64_t fingerprint_of(const hsgd_options& options, size_t chunk_bytes) {
  uint64_t hash = 14695981039346656037u;
  const uint64_t values[] = {chunk_bytes,
                             static_cast<uint64_t>(options.oneshot_bytes),
                             static_cast<uint64_t>(options.chunk_bytes),
                             options.known_allreduce_bytes,
                             options.wire_oneshot_bytes,
                             options.slots,
                             options.nontemporal,
                             options.wire_dtype,
                             options.wire_radix,
                             options.flat_ranks};
  for (const uint64_t value : values) hash = (hash ^ value) * 1099511628211u;
  return hash;
}

LocalGroup::Settings settings_for(const Place& place, const NodeMap& map,
                                  const hsgd_options& options, const StepSizes& sizes, bool leads) {
  LocalGroup::Settings settings;
  settings.rank = place.local_rank;
  settings.size = place.local_size;
  for (int rank = 0; rank < place.local_size; ++rank)
    settings.names.push_back(place.names.of(map.rank(map.first(map.node()) + rank)));
  settings.layout = sizes.layout();
  settings.flat_ranks = static_cast<int>(options.flat_ranks);
  settings.one_out_ring = place.node_count > 1;
  settings.fingerprint = fingerprint_of(options, sizes.ring_bytes());
  settings.processes =
      options.process != nullptr ? options.process->watch : std::make_shared<ProcessWatch>();
  settings.wait.spin = options.spin;
  settings.wait.progress = options.progress;
  // A message over TCP can take this long, and it cannot wake a sleeping rank.
  if (leads) settings.wait.yield_ns = 200'000;
  // Without MPI to drive, a rank that is no leader waits for ranks of its node only, which ring.
  settings.wait.all_rings = !leads && options.progress == nullptr;
  return settings;
}

Place with_names(Place place, const int32_t* names) {
  place.names = RankNames(names, place.size);
  return place;
}

StatusPlace status_place(const Place& place) {
  return {place.rank,       place.size,      place.local_rank,
          place.local_size, place.node_rank, place.node_count};
}

std::string late(double timeout_s, const std::string& who) {
  return text(": not finished within the timeout of %g s: %s; ", timeout_s, who.c_str());
}

}  // namespace

Context::Context(const std::string& path, Listener* listener, Place place,
                 std::unique_ptr<Transport> transport, const hsgd_options& options, Watch* watch)
    : place_(with_names(std::move(place), options.rank_names)),
      map_(place_.node_of_rank, place_.size, place_.node_rank, place_.local_rank),
      options_(with_wire_slots(place_.node_count, options)),
      rounds_(place_.node_count, static_cast<int>(options_.wire_radix)),
      sizes_(place_, map_, rounds_, options_),
      kernels_{detect_isa(), select_copy(detect_isa())},
      stores_(options_, one_node(), place_.local_size, sizes_.tuning().store),
      note_(options_.process != nullptr ? options_.process->status.get() : nullptr,
            status_place(place_), path),
      links_(std::make_unique<Links>(std::move(transport), place_, rounds_, sizes_, options_)),
      group_(meet_on_node(path, listener, Deadline(options.timeout_s, options.interrupted, watch))),
      inputs_(static_cast<size_t>(std::max(place_.local_size, place_.node_count))),
      setup_watch_(watch) {
  options_.rank_names = place_.names.data();
  for (int rank = 0; rank < place_.local_size; ++rank) {
    HSGD_CHECK(group_->name(rank) == place_.names.of(world_rank_of(rank)));
  }
}

std::unique_ptr<LocalGroup> Context::meet_on_node(const std::string& path, Listener* listener,
                                                  const Deadline& deadline) {
  const auto meet = [&] {
    const auto settings = settings_for(place_, map_, options_, sizes_, links_->leads());
    return std::make_unique<LocalGroup>(path, listener, settings, deadline);
  };
  return or_give_up(place_.name(), meet, [this](const Error& error) {
    tell_other_nodes(for_others(error, place_.name()), 0);
    links_->quiesce(Deadline(1.0));
  });
}

// Ends this rank's part. The collectives it took part in still complete on other ranks, because the
// transport already has all messages for them. MPI may still hold a small message that it reported
// as sent; it sends that one at this process's next MPI call, in MPI_Finalize at the latest.
Context::~Context() {
  if (!links_->leads()) return;
  // During set-up each node counts on its own, and a failed rank has already reported the reason.
  const bool is_set_up = first_sequence_ != 0;
  if (is_set_up) {
    try {
      links_->part({call_.sequence + 1, place_.name(), Parting::kClosed,
                    group_->closing(place_.local_rank)});
    } catch (const std::exception&) {  // out of memory for the message: its connections close
                                       // without one
    }
  }
  HSGD_FAULT_POINT("close: other nodes told");
  if (links_->quiesce(Deadline(1.0))) return;
  // A send to a hanging node is still in progress and needs its buffers, so all objects that may
  // hold one stay until the process ends.
  static_cast<void>(links_.release());
  static_cast<void>(group_.release());
}

void Context::end_setup(uint64_t collectives) {
  HSGD_CHECK(call_.sequence <= collectives);
  if (first_count() != 0) finish_steps(first_count());
  first_sequence_ = call_.sequence = std::max(collectives, first_count());
  statistics_.counters = {};
  statistics_.wait_ticks = 0;
  stores_.start_with(sizes_.tuning().store);
  setup_watch_ = nullptr;
  // Nodes do not know the ids of other nodes; the caller may have set a common one.
  note_.open(one_node() || options_.comm_id == 0 ? group_->id() : options_.comm_id);
}

int Context::node_of(int world_rank) const {
  if (world_rank < 0 || world_rank >= place_.size) return -1;
  return place_.node_of_rank.empty() ? 0 : place_.node_of_rank[static_cast<size_t>(world_rank)];
}

int Context::local_rank_of(int world_rank) const {
  for (int rank = 0; rank < place_.local_size; ++rank) {
    if (world_rank_of(rank) == world_rank) return rank;
  }
  return -1;
}

// --- one collective ---

void Context::begin(const Signature& signature, const hsgd_label* label) {
  ++call_.sequence;
  call_.signature = signature;
  call_.label = label;
  call_.open_seen = 0;
  call_.headers_started = call_.asks_other_nodes = call_.node_agrees = false;
  stores_.begin();
}

std::string Context::what() const {
  if (first_sequence_ == 0) return "set-up";
  return describe_call(user_sequence(), call_.signature, call_.label);
}

void Context::open(const Operation& operation, const void* payload, size_t bytes,
                   const std::function<void()>& combine) {
  const bool own = operation.receive_counts != nullptr;  // its counts are known to this rank only
  HSGD_FAULT_POINT("header: not open yet");
  const bool last = group_->open(call_.sequence, operation.signature, operation.label, payload,
                                 bytes, own ? Counts{} : operation.counts, stores_.cost(),
                                 stop_requested_.load(std::memory_order_relaxed));
  if (last) {
    if (combine && !group_->differ(call_.sequence)) combine();
    group_->tell_opened(call_.sequence);
  }
  HSGD_FAULT_POINT("header: open");
}

void Context::finish_steps(uint64_t steps) {
  base_ += steps;
  for (auto member : {&Progress::staged, &Progress::reduced, &Progress::gathered}) {
    group_->publish(member, base_);
  }
  // Also for a leader that carried no step of this collective.
  if (links_->leads()) group_->publish(&Progress::exchanged, base_, LocalGroup::Audience::kEach);
}

void Context::skip_steps() {
  constexpr uint64_t kSkippedSteps = 1024;
  finish_steps(kSkippedSteps);
}

// --- waiting ---

// Checks for failures; called from time to time while this rank waits. The first call starts the
// deadline, so the fast path pays nothing for it.
void Context::check() {
  if (!deadline_) {
    const bool background = background_.load() == std::this_thread::get_id();
    deadline_.emplace(options_.timeout_s, background ? nullptr : options_.interrupted);
  }
  if (stop_waiting_ || deadline_->interrupted())
    throw Error(HSGD_ERR_INTERRUPTED, -1,
                what() + text(": rank %d was interrupted", place_.name()));
  if (setup_watch_ != nullptr) setup_watch_->check();
  check_left_out(*group_);
  group_->see_who_waits(call_.sequence);
  const int awaited = group_->awaited(call_.sequence);
  note_.look(awaited < 0 ? -1 : world_rank_of(awaited), links_->awaited_node());
  group_->check_peers(call_.sequence, what());
  if (expired_s_ > 0) throw expired();
  const Parting* parted = links_->parted(call_.sequence);
  if (!deadline_->passed() && parted == nullptr) return;
  int first = -1;
  std::string who = group_->missing(call_.sequence, &first);
  // Deadlines expire on all nodes at about the same time; the cause may be a rank of this node.
  const bool is_late = static_cast<double>(deadline_->remaining_ns()) < 1e8 * options_.timeout_s;
  // Other nodes can only guess about a rank of this node; here its state is known.
  if (parted != nullptr && parted->how == Parting::kTimedOut && first >= 0 &&
      node_of(place_.names.rank_of(parted->rank)) == place_.node_rank) {
    throw Error(HSGD_ERR_TIMEOUT, first,
                what() + ": another node gave up waiting for this one: " + who);
  }
  if (parted != nullptr && (parted->how == Parting::kClosed || !is_late || first < 0)) {
    const bool timed_out = parted->how == Parting::kTimedOut;
    const char* gave_up = parted->how == Parting::kClosed ? ": " : ": another node gave up: ";
    throw Error(timed_out ? HSGD_ERR_TIMEOUT : HSGD_ERR_PEER_LOST, parted->rank,
                what() + gave_up + foreign_words(parted->line, sizeof parted->line));
  }
  if (first < 0 && options_.late == nullptr) {
    if (!std::exchange(call_.asks_other_nodes, true)) {
      deadline_ = deadline_->renewed(grace_s());
      return;
    }
    who = who_is_late(&first);
  }
  const std::string line = what() + late(options_.timeout_s, who);
  if (options_.late == nullptr)
    throw Error(HSGD_ERR_TIMEOUT, first, line + "raise HSGD_TIMEOUT_S if this is expected");
  if (group_->is_first_that_waits()) {  // once per node, because no node knows whether others wait,
                                        // too
    options_.late((line + "still waiting (set HSGD_TIMEOUT_S to make this an error)").c_str());
  }
  deadline_ = deadline_->renewed(options_.timeout_s);
}

Error Context::expired() const {
  int first = -1;
  const std::string who = who_is_late(&first);
  return Error(HSGD_ERR_TIMEOUT, first,
               what() + late(expired_s_, who) + "make a new communicator or process group");
}

std::string Context::who_is_late(int* first) const {
  std::string who = group_->missing(call_.sequence, first);
  const int node = *first < 0 ? links_->awaited_node() : -1;
  if (node < 0) return who;
  *first = links_->leader_of(node);
  if (*first < 0) *first = place_.names.of(map_.rank(map_.first(node)));
  return text("still waiting for the node of rank %d", *first);
}

// Returns the extra seconds before a timeout. They give the node with the late rank time to report
// it. A rank that can hear this report gets less extra time than a rank that waits for such a rank.
double Context::grace_s() const {
  const double grace = std::min(1.0, options_.timeout_s / 4);
  return links_->awaited_node() >= 0 ? grace : 1.5 * grace;
}

void Context::give_up(const Error& error, uint64_t first_missed) {
  const Error others = for_others(error, place_.name());
  group_->fail(others, first_missed);
  tell_other_nodes(others, first_missed);
}

void Context::tell_other_nodes(const Error& error, uint64_t first_missed) {
  const auto how = error.code() == HSGD_ERR_TIMEOUT ? Parting::kTimedOut : Parting::kGaveUp;
  links_->part({first_missed, error.rank(), how, error.what()});
}

}  // namespace hsgd
