// One communicator: regimes, signature checks, deadlines and errors.
#include "collectives/communicator.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.hpp"
#include "base/fault_points.hpp"
#include "collectives/zero_copy.hpp"
#include "collectives/zero_copy_blocks.hpp"
#include "node/survivors.hpp"

namespace hsgd {
namespace {

constexpr size_t kChunkUnit = 512;  // whole lines of every dtype

// Steps that are skipped when ranks disagree: what somebody staged for the refused collective is
// then never mistaken for a step of a later one.
constexpr uint64_t kSkippedSteps = 1024;
// Broadcasts of this size and more go down a chain of nodes, which costs one transfer per link.
constexpr uint64_t kChainBytes = 1 << 20;

// What rounding costs the blocks of all ranks (see internode/rank_blocks.hpp) is at most half of
// such a step.
size_t least_block_step_bytes(const NodeMap& map) {
  const auto most = static_cast<size_t>(map.most_ranks());
  const size_t per_rank = map.nodes() == 1 ? 4 * kLine : std::max(4 * kLine, 24 * most + 2 * kLine);
  return round_up(static_cast<size_t>(map.nodes()) * most * per_rank, kChunkUnit);
}

// Messages of this size are small enough that MPI sends them at once (Open MPI over TCP up to 64
// KiB), without asking the receiver first, and that they spread over its sockets. Larger ones left
// the link idle for up to a third of the time, much smaller ones cost processor time
// (docs/performance.md).
constexpr size_t kMessageBytes = 56 << 10;

// Payload of one pipeline step; between nodes, where it is not given, it makes such messages.
size_t chunk_bytes_for(const Place& place, const NodeMap& map, const hsgd_options& options) {
  constexpr size_t kLeastMessageBytes = 16 << 10;
  constexpr size_t kMostChunkBytes = 2 << 20;  // many nodes: smaller messages, of which more fly
  const auto messages = static_cast<size_t>(place.leaders) * static_cast<size_t>(place.node_count);
  const size_t wanted = place.node_count == 1 ? Tuning::of(options, 0).chunk_bytes
                        : options.wire_chunk_bytes > 0
                            ? options.wire_chunk_bytes
                            : std::max(std::min(kMessageBytes * messages, kMostChunkBytes),
                                       kLeastMessageBytes * messages);
  return std::max(least_block_step_bytes(map), round_up(wanted, kChunkUnit));
}

// What one cell holds: on one node as much as a measurement may choose, between nodes, where each
// sends its whole sum to all others, the switch point itself, which must be the same on all.
size_t cell_bytes_for(const Place& place, const hsgd_options& options) {
  constexpr uint64_t kAlwaysBytes = 4096;  // latency, whatever the number of nodes
  if (place.node_count > 1) {
    return std::max(std::min(options.wire_oneshot_bytes, kAlwaysBytes),
                    options.wire_oneshot_bytes / static_cast<uint64_t>(place.node_count - 1));
  }
  const bool measured = place.local_size > 1;
  return Tuning::of(options, measured ? Tuning::kMostOneshotBytes : Tuning().oneshot_bytes)
      .oneshot_bytes;
}

Tuning tuning_for(const Place& place, const hsgd_options& options) {
  Tuning tuning = Tuning::of(options, Tuning().oneshot_bytes);
  if (place.node_count > 1) tuning.oneshot_bytes = cell_bytes_for(place, options);
  return tuning;
}

// One slot more between nodes: with four, the last of five steps, which is 1 MB on two nodes, began
// when the first was done, and its result crossed the link alone.
hsgd_options with_wire_slots(const Place& place, hsgd_options options) {
  if (place.node_count > 1) ++options.slots;
  return options;
}

Layout layout_for(const Place& place, const hsgd_options& options, size_t chunk_bytes) {
  const size_t own_slice = chunk_bytes / static_cast<size_t>(place.local_size) + 2 * kLine;
  return Layout(cell_bytes_for(place, options), chunk_bytes,
                place.node_count == 1 ? own_slice : chunk_bytes, options.slots);
}

// FNV-1a over whole words: a change of any one value changes it.
uint64_t fingerprint_of(const hsgd_options& options, size_t chunk_bytes) {
  uint64_t hash = 14695981039346656037u;
  const uint64_t values[] = {chunk_bytes,
                             static_cast<uint64_t>(options.oneshot_bytes),
                             static_cast<uint64_t>(options.chunk_bytes),
                             options.wire_oneshot_bytes,
                             options.slots,
                             options.nontemporal,
                             options.wire_dtype};
  for (const uint64_t value : values) hash = (hash ^ value) * 1099511628211u;
  return hash;
}

LocalGroup::Settings settings_for(const Place& place, const hsgd_options& options,
                                  size_t chunk_bytes) {
  LocalGroup::Settings settings;
  settings.rank = place.local_rank;
  settings.size = place.local_size;
  settings.world_rank = place.rank;
  settings.layout = layout_for(place, options, chunk_bytes);
  settings.one_out_ring = place.node_count > 1;
  settings.fingerprint = fingerprint_of(options, chunk_bytes);
  settings.wait.spin = options.spin;
  settings.wait.progress = options.progress;
  return settings;
}

// While the ranks of a group meet again, a death among them is told as soon as in a collective.
class PeerWatch final : public Watch {
 public:
  PeerWatch(const LocalGroup& local, const char* what) : local_(local), what_(what) {}
  void check() override {
    has_spoken_ = true;
    local_.check_peers(LocalGroup::kAnySequence, what_);
    has_spoken_ = false;
  }
  bool has_spoken() const { return has_spoken_; }  // what was thrown is its

 private:
  const LocalGroup& local_;
  const char* what_;
  bool has_spoken_ = false;
};

// Waiting failed, and nothing of this rank's own.
bool is_of_peer(const Error& error) {
  return error.code() == HSGD_ERR_TIMEOUT || error.code() == HSGD_ERR_PEER_LOST ||
         error.code() == HSGD_ERR_INTERRUPTED;
}

}  // namespace

Communicator::Communicator(const std::string& path, Listener* listener, Place place,
                           std::unique_ptr<Transport> transport, const hsgd_options& options,
                           Watch* watch)
    : place_(std::move(place)),
      map_(place_.node_of_rank, place_.size, place_.node_rank, place_.local_rank),
      options_(with_wire_slots(place_, options)),
      chunk_bytes_(chunk_bytes_for(place_, map_, options)),
      isa_(detect_isa()),
      copy_(select_copy(isa_)),
      tuning_(tuning_for(place_, options)),
      stores_(tuning_.store),
      transport_(std::move(transport)),
      group_(std::make_unique<LocalGroup>(path, listener,
                                          settings_for(place_, options_, chunk_bytes_),
                                          Deadline(options.timeout_s, options.interrupted, watch))),
      local_(*group_),
      setup_watch_(watch),
      inputs_(static_cast<size_t>(std::max(place_.local_size, place_.node_count))) {
  for (int rank = 0; rank < place_.local_size; ++rank) {
    HSGD_CHECK(local_.world_rank(rank) == map_.rank(map_.first(map_.node()) + rank));
  }
  if (transport_ != nullptr) {
    messages_ = std::make_unique<StepMessages>(*transport_, options_.slots, wire_counters_);
    const size_t slice_bytes =
        std::max(kChunkUnit, chunk_bytes_ / static_cast<size_t>(place_.leaders)) + 2 * kLine;
    slices_ = std::make_unique<SliceExchange>(*transport_, slice_bytes, options_.slots,
                                              options_.wire_dtype != HSGD_FLOAT32, wire_counters_);
    if (place_.local_rank == 0) {
      headers_ =
          std::make_unique<HeaderExchange>(*transport_, tuning_.oneshot_bytes, wire_counters_);
      tree_ = std::make_unique<TreeBroadcast>(*transport_, options_.slots, wire_counters_);
    }
  }
  tune();
  stores_ = StoreChoices(tuning_.store);
  setup_watch_ = nullptr;
}

// Collectives up to the last one that this rank took part in still end well elsewhere: all that it
// had to send for them is with the transport. MPI may call a small message sent that it still
// holds; that goes when this process calls MPI again, in MPI_Finalize at the latest.
Communicator::~Communicator() {
  if (transport_ == nullptr) return;
  transport_->part({sequence_ + 1, place_.rank, true, local_.closing(place_.local_rank)});
  HSGD_FAULT_POINT("close: other nodes told");
  if (transport_->quiesce(Deadline(1.0))) return;
  // A send to a node that hangs is still under way: its buffers must outlive it, so all that may
  // hold one stays until the process ends.
  static_cast<void>(headers_.release());
  static_cast<void>(slices_.release());
  static_cast<void>(tree_.release());
  static_cast<void>(messages_.release());
  static_cast<void>(transport_.release());
  static_cast<void>(group_.release());
}

hsgd_topology Communicator::topology() const {
  hsgd_topology topology{};
  topology.rank = place_.rank;
  topology.size = place_.size;
  topology.local_rank = place_.local_rank;
  topology.local_size = place_.local_size;
  topology.node_rank = place_.node_rank;
  topology.node_count = place_.node_count;
  topology.leaders = place_.leaders;
  topology.nontemporal = tuning_.store == Store::kNonTemporal ? 1 : 0;
  topology.oneshot_bytes = tuning_.oneshot_bytes;
  topology.chunk_bytes = step_bytes();
  return topology;
}

hsgd_counters Communicator::counters() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  hsgd_counters counters = counters_;
  counters.inter_bytes_sent = wire_counters_.bytes_sent;
  counters.inter_bytes_received = wire_counters_.bytes_received;
  counters.total_ns = clock_.to_ns(total_ticks_);
  counters.wait_ns = clock_.to_ns(wait_ticks_);
  return counters;
}

// --- entry ---

void Communicator::allreduce(const void* in, void* out, uint64_t count, hsgd_dtype dtype,
                             hsgd_op op, const hsgd_label* label) {
  Operation operation;
  operation.signature = Signature::pack(Kind::kAllreduce, dtype, op, 0, count, hash_label(label));
  operation.label = label;
  operation.in = in;
  operation.out = out;
  operation.count = count;
  // Field by field: a struct that is stored in parts and copied as a whole waits for its parts.
  operation.reduction.reduce = select_reduce(dtype, op, isa_);
  operation.reduction.copy = copy_;
  operation.reduction.element_bytes = hsgd_dtype_bytes(dtype);
  if (op == HSGD_MEAN) operation.reduction.divisor = static_cast<double>(place_.size);
  if (options_.wire_dtype != HSGD_FLOAT32) operation.reduction.narrowing = narrowing_of(dtype, op);
  run(operation);
}

// Half the bytes between nodes, for float32 and on request.
Narrowing Communicator::narrowing_of(hsgd_dtype dtype, hsgd_op op) const {
  const auto narrow = static_cast<hsgd_dtype>(options_.wire_dtype);
  if (dtype != HSGD_FLOAT32 || narrow == HSGD_FLOAT32) return {};
  return {select_conversion(narrow, isa_), select_reduce(narrow, op, isa_)};
}

void Communicator::broadcast(void* data, uint64_t count, hsgd_dtype dtype, int root,
                             const hsgd_label* label) {
  Operation operation;
  operation.signature =
      Signature::pack(Kind::kBroadcast, dtype, HSGD_SUM, root, count, hash_label(label));
  operation.label = label;
  operation.in = data;
  operation.out = data;
  operation.count = count;
  operation.reduction = {nullptr, copy_, hsgd_dtype_bytes(dtype), 1.0};
  operation.root = root;
  run(operation);
}

void Communicator::barrier() {
  Operation operation;
  operation.signature = Signature::pack(Kind::kBarrier, HSGD_UINT8, HSGD_SUM, 0, 0, 0);
  operation.reduction = {select_reduce(HSGD_UINT8, HSGD_SUM, isa_), copy_, 1, 1.0};
  run(operation);
}

void Communicator::check_mine() const {
  if (is_mine()) return;
  throw Error(HSGD_ERR_CLOSED, -1,
              text("this communicator belongs to process %d, of which this one is a forked "
                   "child; make one in each process",
                   owner_.pid()));
}

void Communicator::check_background() const {
  check_mine();
  if (place_.one_thread.empty()) return;
  throw Error(HSGD_ERR_SYSTEM, -1, "asynchronous collectives between nodes: " + place_.one_thread);
}

void Communicator::check_thread() const {
  if (place_.is_foreign_thread == nullptr || !place_.is_foreign_thread()) return;
  throw Error(HSGD_ERR_SYSTEM, -1,
              "collectives between nodes, in this thread: " + place_.why_foreign);
}

void Communicator::run(Operation& operation) {
  check_mine();
  check_thread();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.empty()) {
    check_left_out(local_);
    throw Error(HSGD_ERR_CLOSED, -1,
                "this communicator is broken since an earlier error: " + broken_);
  }
  deadline_.reset();
  begin_collective(operation.signature);
  struct Forget {  // the caller's label lives as long as the call
    const hsgd_label*& label;
    ~Forget() { label = nullptr; }
  } forget{label_ = operation.label};
  const uint64_t weight = clock_weight(operation);
  const uint64_t start = weight > 0 ? ticks() : 0;
  const uint64_t waited = wait_ticks_;
  recorder_.begin(operation.label == nullptr ? nullptr : operation.label->name, operation.bytes());
  try {
    run_locally(operation);
  } catch (const Error& error) {
    if (error.code() == HSGD_ERR_SIGNATURE) {  // seen by all ranks alike, before any data moved
      finish_steps(kSkippedSteps);
      throw;
    }
    give_up(error, sequence_);
    throw;
  } catch (const std::exception& error) {  // out of memory, most likely
    give_up(Error(HSGD_ERR_SYSTEM, place_.rank, error.what()), sequence_);
    throw;
  }
  if (current_.kind() == Kind::kAllocate) {
    shares_ = true;
  } else {
    ++counters_.calls;
    counters_.payload_bytes += operation.bytes();
    if (recorder_.current() != nullptr) recorder_.end(clock_.to_ns(wait_ticks_ - waited));
  }
  const uint64_t idle = wait_ticks_ - waited;
  total_ticks_ += idle;
  if (weight == 0) return;
  const uint64_t worked = ticks() - start - idle;
  total_ticks_ += weight * worked;
  if (staged_.choice != nullptr) {
    compared_ = staged_;
    compared_.ticks = worked;
  }
}

// How many collectives this one's work stands for in the counters. Reading the clock twice takes a
// tenth of a small one: of those every sixteenth is timed, and counts for all of them.
uint64_t Communicator::clock_weight(const Operation& operation) const {
  constexpr uint64_t kEvery = 16;
  if (operation.bytes() > tuning_.oneshot_bytes || place_.node_count > 1) return 1;
  return (sequence_ - first_sequence_) % kEvery == 1 ? kEvery : 0;
}

void Communicator::begin_collective(const Signature& signature) {
  ++sequence_;
  current_ = signature;
  open_seen_ = 0;
  headers_started_ = false;
  staged_ = {};
}

// Nobody waits for this rank from now on. Others may still be in a collective before
// `first_missed`, which misses nothing of it.
void Communicator::give_up(const Error& error, uint64_t first_missed) {
  const bool interrupted = error.code() == HSGD_ERR_INTERRUPTED;  // for the others it is lost
  const int about = interrupted ? place_.rank : error.rank();
  broken_ = error.what();
  local_.fail(Error(interrupted ? HSGD_ERR_PEER_LOST : error.code(), about, broken_), first_missed);
  if (transport_ != nullptr) transport_->part({first_missed, about, false, broken_});
}

void Communicator::leave() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !broken_.empty()) return;
  give_up(Error(HSGD_ERR_PEER_LOST, place_.rank, local_.closing(place_.local_rank)), sequence_ + 1);
}

void Communicator::abandon(const Error& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  give_up(error, sequence_ + 1);
  throw Error(error);
}

void Communicator::run_locally(const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  if (place_.size == 1) {
    if (!broadcasts && operation.in != operation.out)
      copy_(operation.out, operation.in, operation.bytes(), Store::kOrdinary);
  } else if (operation.counts.ranks > 0) {
    run_on_blocks(operation);
  } else if (operation.count == 0 || operation.bytes() <= tuning_.oneshot_bytes) {
    place_.node_count == 1 ? small_on_node(operation) : small_between_nodes(operation);
  } else {
    broadcasts ? large_broadcast(operation) : large_allreduce(operation);
  }
}

std::shared_ptr<SharedBuffer> Communicator::allocate(uint64_t count, hsgd_dtype dtype,
                                                     bool once_per_node, const hsgd_label* label) {
  const std::lock_guard<std::mutex> allocating(allocating_);
  Operation agreement;
  agreement.signature =
      Signature::pack(Kind::kAllocate, dtype, HSGD_SUM, once_per_node, count, hash_label(label));
  agreement.label = label;
  const char* what = once_per_node ? "shared" : "empty";
  const size_t available = available_memory_bytes();  // all look before anybody takes
  run(agreement);
  const uint64_t id = ++allocations_;
  // An array of the node lies in parts of the same size, each with the rank that made it.
  const size_t parts = once_per_node ? static_cast<size_t>(place_.local_size) : 1;
  const size_t wanted = std::max<size_t>(1, count * hsgd_dtype_bytes(dtype));
  const size_t each = (wanted + parts - 1) / parts;
  // Large parts are a little larger, so that the huge pages of all of them can be mapped in a row.
  const size_t bytes =
      round_up(each, parts > 1 && each >= 8 * kHugePage ? kHugePage : page_bytes());
  std::shared_ptr<SharedBuffer> buffer;
  // Each step on all ranks or on none, so that nobody waits for one that has failed.
  attempt_on_all(what, [&] {
    buffer =
        std::make_shared<SharedBuffer>(id, place_.local_rank, place_.local_size, bytes, available);
    if (place_.local_rank == 0) group_->appoint_meeting();
  });
  HSGD_FAULT_POINT("empty: segment made");
  attempt_on_all(what, [&] {
    share(*buffer, once_per_node);
    HSGD_FAULT_POINT("empty: shared");
  });
  if (once_per_node) return buffer;  // collectives take it for private memory
  const std::lock_guard<std::mutex> lock(mutex_);
  arena_.add(buffer);
  return buffer;
}

// The ranks of the node meet. Where they do so, local ranks are what counts.
void Communicator::share(SharedBuffer& buffer, bool in_a_row) {
  const char* what = in_a_row ? "shared" : "empty";
  PeerWatch watch(local_, what);
  try {
    buffer.share(local_.next_meeting(), place_.rank, in_a_row,
                 Deadline(options_.timeout_s, options_.interrupted, &watch));
  } catch (const Error& error) {
    const bool late = error.code() == HSGD_ERR_TIMEOUT;
    const bool of_peer = late || error.code() == HSGD_ERR_PEER_LOST;
    if (!of_peer || error.rank() < 0 || watch.has_spoken()) throw;
    throw Error(error.code(), local_.world_rank(error.rank()),
                text("%s: ", what) + local_.person(error.rank()) +
                    (late ? text(" did not come to share its memory within %g s; raise "
                                 "HSGD_TIMEOUT_S if this is expected",
                                 options_.timeout_s)
                          : " left"));
  }
}

// Throws on all ranks when `body` throws on one. Not asked about is the failure of a peer: who did
// not come once would be waited for again.
template <class Body>
void Communicator::attempt_on_all(const char* what, Body&& body) {
  std::optional<Error> failure;
  try {
    body();
  } catch (const Error& error) {
    failure = error;
  }
  if (failure && is_of_peer(*failure)) abandon(*failure);
  int32_t failed = failure ? place_.rank + 1 : 0;
  Operation vote;
  vote.signature = Signature::pack(Kind::kAllocate, HSGD_INT32, HSGD_MAX, 0, 1, 0);
  vote.in = vote.out = &failed;
  vote.count = 1;
  vote.reduction = {select_reduce(HSGD_INT32, HSGD_MAX, isa_), copy_, sizeof failed, 1.0};
  run(vote);
  if (failure) throw Error(*failure);
  if (failed != 0) {
    throw Error(HSGD_ERR_MEMORY, failed - 1,
                text("%s: rank %d could not get its shared memory; it says why", what, failed - 1));
  }
}

// --- headers ---

void Communicator::open(const Operation& operation, const void* payload, size_t bytes) {
  const bool own = operation.receive_counts != nullptr;  // no counts that others have, too
  HSGD_FAULT_POINT("header: not open yet");
  local_.open(sequence_, operation.signature, operation.label, payload, bytes,
              own ? Counts{} : operation.counts, compared_.ticks);
  HSGD_FAULT_POINT("header: open");
}

// On one node: throws when ranks differ.
void Communicator::wait_for_headers() {
  wait([&] { return headers_open() ? Step::kDone : Step::kIdle; });
  require_agreement();
}

void Communicator::require_agreement() {
  Call sides[2];
  if (!headers_agree(sides)) fail_mismatch(sides);
  if (compared_.choice != nullptr) learn_cost();
}

// All ranks of the node see the same headers, and so choose alike.
void Communicator::learn_cost() {
  uint64_t most = 0;
  for (int rank = 0; rank < place_.local_size; ++rank)
    most = std::max(most, local_.cost(rank, sequence_));
  compared_.choice->learn(static_cast<double>(most) / static_cast<double>(compared_.bytes));
  compared_ = {};
}

// Between nodes: local rank 0 has heard from all nodes, and says what came of it.
void Communicator::wait_for_result() {
  wait([&] { return local_.has_result(sequence_) ? Step::kDone : Step::kIdle; });
  if (local_.result_status(sequence_) == HSGD_ERR_SIGNATURE) fail_mismatch(local_.mismatch());
}

bool Communicator::headers_open() {
  while (open_seen_ < place_.local_size && local_.is_open(open_seen_, sequence_)) ++open_seen_;
  return open_seen_ == place_.local_size;
}

// All ranks of the node come to the same answer: the first rank that differs from local rank 0.
bool Communicator::headers_agree(Call sides[2]) const {
  const Signature& first = local_.signature(0, sequence_);
  for (int rank = 1; rank < place_.local_size; ++rank) {
    if (local_.signature(rank, sequence_) == first) continue;
    sides[0] = local_.call(0, sequence_);
    sides[1] = local_.call(rank, sequence_);
    return false;
  }
  return true;
}

void Communicator::fail_mismatch(const Call sides[2]) const {
  throw MismatchError(sides[1].rank,
                      describe_mismatch(sequence_ - first_sequence_, sides[0], sides[1]),
                      side_of(sides[0]), side_of(sides[1]));
}

// Local rank 0 tells the other nodes what this one called, or that its ranks differ.
void Communicator::start_headers(Outgoing outgoing) {
  WireHeader header{};
  header.note = outgoing.note;
  header.sequence = sequence_;
  Call sides[2] = {local_.call(0, sequence_), Call{}};
  if (!headers_agree(sides)) {
    header.status = HSGD_ERR_SIGNATURE;
    outgoing.bytes = 0;
  }
  header.call = sides[0];
  header.other = sides[1];
  headers_->start(header, outgoing.payload, outgoing.bytes);
  headers_started_ = true;
}

// The part of local rank 0 in a small collective between nodes: `collect` what the ranks here have
// put into their cells, when all headers agree, exchange it together with the headers, and
// `combine` what came into the result cell.
void Communicator::lead(const std::function<Outgoing()>& collect,
                        const std::function<void()>& combine) {
  wait([&] { return headers_open() ? Step::kDone : Step::kIdle; });
  Call sides[2];
  const Outgoing outgoing = headers_agree(sides) ? collect() : Outgoing{};
  at_level(recorder_.current(), &hsgd_record::inter, [&] {
    start_headers(outgoing);
    return true;
  });
  wait([&] {
    const auto done = [&] { return headers_->done(); };
    return at_level(recorder_.current(), &hsgd_record::inter, done) ? Step::kDone : Step::kIdle;
  });
  const hsgd_status status = judge_headers(local_.mismatch());
  if (status == HSGD_OK) combine();
  HSGD_FAULT_POINT("between nodes: result not published");
  local_.publish_result(sequence_, status);
  HSGD_FAULT_POINT("between nodes: result published");
}

hsgd_status Communicator::judge_headers(Call sides[2]) const {
  for (int node = 0; node < place_.node_count; ++node) {
    const WireHeader& header = headers_->header(node);
    HSGD_CHECK(header.sequence == sequence_);
    if (header.status == HSGD_OK) continue;
    sides[0] = header.call;
    sides[1] = header.other;
    return HSGD_ERR_SIGNATURE;
  }
  for (int node = 1; node < place_.node_count; ++node) {
    if (headers_->header(node).call.signature == headers_->header(0).call.signature) continue;
    sides[0] = headers_->header(0).call;
    sides[1] = headers_->header(node).call;
    return HSGD_ERR_SIGNATURE;
  }
  return HSGD_OK;
}

// May the pipeline move data? Throws when ranks differ.
Permission Communicator::permission() {
  if (!headers_open()) return Permission::kUnknown;
  if (place_.node_count == 1) {
    require_agreement();
    return Permission::kGranted;
  }
  if (place_.local_rank == 0 && !local_.has_result(sequence_)) {
    if (!headers_started_) start_headers({});
    if (!headers_->done()) return Permission::kUnknown;
    const hsgd_status status = judge_headers(local_.mismatch());
    local_.publish_result(sequence_, status);
    HSGD_FAULT_POINT("between nodes: permission published");
  }
  if (!local_.has_result(sequence_)) return Permission::kUnknown;
  if (local_.result_status(sequence_) == HSGD_ERR_SIGNATURE) fail_mismatch(local_.mismatch());
  return Permission::kGranted;
}

// --- small payloads ---

void Communicator::reduce_payloads(const Operation& operation, const Range& part, void* out,
                                   double divisor) {
  const size_t size = operation.reduction.element_bytes;
  for (int rank = 0; rank < place_.local_size; ++rank) {
    const void* payload = rank == place_.local_rank
                              ? operation.in
                              : local_.payload(rank, sequence_, operation.bytes());
    inputs_[static_cast<size_t>(rank)] = static_cast<const std::byte*>(payload) + part.begin * size;
  }
  at_level(recorder_.current(), &hsgd_record::reduce, [&] {
    operation.reduction.reduce({inputs_.data(), place_.local_size, out, nullptr, part.count(),
                                divisor, Store::kOrdinary, Store::kOrdinary});
    return true;
  });
  counters_.intra_bytes += static_cast<uint64_t>(place_.local_size) * part.count() * size;
}

// Everybody reads everybody's payload: one synchronization.
void Communicator::small_on_node(const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  const bool sends = !broadcasts || operation.root == place_.rank;
  open(operation, sends ? operation.in : nullptr, operation.bytes());
  wait_for_headers();
  if (operation.count == 0) return;
  if (!broadcasts) {
    reduce_payloads(operation, operation.wanted(), operation.out, operation.reduction.divisor);
  } else if (!sends) {
    std::memcpy(operation.out,
                local_.payload(local_rank_of(operation.root), sequence_, operation.bytes()),
                operation.bytes());
    counters_.intra_bytes += operation.bytes();
  }
}

// Local rank 0 collects its node's payloads, exchanges them with the other nodes together with the
// headers, and publishes the result.
void Communicator::small_between_nodes(const Operation& operation) {
  const bool sends = operation.root < 0 || operation.root == place_.rank;
  open(operation, sends ? operation.in : nullptr, operation.bytes());
  if (place_.local_rank == 0) lead_small(operation);
  wait_for_result();
  if (operation.count == 0 || operation.root == place_.rank) return;
  const size_t size = operation.reduction.element_bytes;
  const Range part = operation.wanted();
  std::memcpy(operation.out,
              local_.result_payload(sequence_, operation.bytes()) + part.begin * size,
              part.count() * size);
  counters_.intra_bytes += part.count() * size;
}

void Communicator::lead_small(const Operation& operation) {
  const size_t bytes = operation.bytes();
  const bool broadcasts = operation.root >= 0;
  const int root_node = broadcasts ? place_.node_of_rank[static_cast<size_t>(operation.root)] : -1;
  std::byte* result = local_.result_payload(sequence_, bytes);
  lead(
      [&]() -> Outgoing {
        if (bytes == 0) return {};
        if (broadcasts) {
          if (root_node != place_.node_rank) return {};
          return {local_.payload(local_rank_of(operation.root), sequence_, bytes), bytes, {}};
        }
        reduce_payloads(operation, {0, operation.count}, result, 1.0);
        return {result, bytes, {}};
      },
      [&] {
        if (bytes == 0) return;
        if (broadcasts) {
          std::memcpy(result, headers_->payload(root_node), bytes);
          return;
        }
        for (int node = 0; node < place_.node_count; ++node) {
          inputs_[static_cast<size_t>(node)] = headers_->payload(node);
        }
        operation.reduction.reduce({inputs_.data(), place_.node_count, result, nullptr,
                                    operation.count, operation.reduction.divisor, Store::kOrdinary,
                                    Store::kOrdinary});
      });
}

int Communicator::node_of(int world_rank) const {
  if (world_rank < 0 || world_rank >= place_.size) return -1;
  return place_.node_of_rank.empty() ? 0 : place_.node_of_rank[static_cast<size_t>(world_rank)];
}

int Communicator::local_rank_of(int world_rank) const {
  for (int rank = 0; rank < place_.local_size; ++rank) {
    if (local_.world_rank(rank) == world_rank) return rank;
  }
  return -1;
}

// --- large payloads ---

PipelineContext Communicator::pipeline_context(int leaders, const Operation& operation) {
  return {local_,
          base_,
          options_.slots,
          leaders,
          tuning_.store,
          out_store(operation),
          &counters_.intra_bytes,
          recorder_.current()};
}

// The same for a collective that stages its input: with the kind of store that is best at present.
PipelineContext Communicator::staged_context(int leaders, const Operation& operation) {
  PipelineContext context = pipeline_context(leaders, operation);
  const bool measured = options_.nontemporal == 2 && place_.node_count == 1;
  StoreChoice* choice =
      measured ? stores_.of(operation.signature.kind(), operation.bytes()) : nullptr;
  if (choice == nullptr) return context;
  context.store = choice->next();
  staged_ = {choice, operation.bytes(), 0};
  return context;
}

size_t Communicator::Operation::out_bytes() const {
  const size_t size = reduction.element_bytes;
  if (receive_counts != nullptr)
    return std::accumulate(receive_counts, receive_counts + counts.ranks, uint64_t{0}) * size;
  return wanted().count() * size;
}

// Large results leave the caches before anybody reads them, and ordinary stores would read their
// lines from memory first. Not where a sum replaces its input, whose lines are there, nor for a
// broadcast: there it was no faster (docs/performance.md).
Store Communicator::out_store(const Operation& operation) const {
  constexpr size_t kStreamedBytes = 4 << 20;
  if (options_.nontemporal == 0 || place_.node_count > 1 || operation.root >= 0)
    return Store::kOrdinary;
  const auto* in = static_cast<const std::byte*>(operation.in);
  const auto* out = static_cast<const std::byte*>(operation.out);
  const bool sums = operation.reduction.reduce != nullptr;
  const bool in_place = sums && out >= in && out < in + operation.bytes();
  return !in_place && operation.out_bytes() >= kStreamedBytes ? Store::kNonTemporal
                                                              : Store::kOrdinary;
}

void Communicator::run_pipeline(Pipeline& pipeline, const Operation& operation, uint64_t steps) {
  if (!local_.is_open(place_.local_rank, sequence_)) {
    wait([&] { return pipeline.stage_first() ? Step::kDone : Step::kIdle; });
    constexpr ArenaPlace kPrivate[2] = {};
    open_large(operation, kPrivate);
  }
  Permission granted = Permission::kUnknown;
  wait([&] {
    if (granted == Permission::kUnknown) granted = permission();
    return pipeline.step(granted);
  });
  HSGD_FAULT_POINT("pipeline: through");
  finish_steps(steps);
}

// How many leaders carry a payload of this size, the same on all ranks: one where more would only
// make more and smaller messages. With fewer leaders steps are shorter: messages stay as large.
Communicator::WirePlan Communicator::wire_plan(size_t bytes) const {
  constexpr size_t kWorthwhileBytes = 10 << 10;  // of one message
  if (place_.node_count == 1) return {0, step_bytes()};
  const auto all = static_cast<size_t>(place_.leaders);
  const size_t wanted = bytes / (kWorthwhileBytes * static_cast<size_t>(place_.node_count));
  const size_t leaders = std::clamp<size_t>(wanted, 1, all);
  const size_t step_bytes = chunk_bytes_ / all * leaders / kChunkUnit * kChunkUnit;
  return {static_cast<int>(leaders),
          leaders == all ? chunk_bytes_ : std::max(kChunkUnit, step_bytes)};
}

// This rank's part of the exchange between nodes; nullptr when it has none.
SliceExchange* Communicator::started_wire(const WirePlan& plan, const Operation& operation) {
  if (place_.local_rank >= plan.leaders) return nullptr;
  slices_->start(operation.reduction);
  return slices_.get();
}

// The header says where the arguments lie: shared buffers are used in place when all ranks of the
// node have the same ones.
void Communicator::open_large(const Operation& operation, const ArenaPlace places[2]) {
  constexpr size_t kPlacesBytes = 2 * sizeof(ArenaPlace);
  static_assert(kPlacesBytes <= CellHeader::kInlineBytes, "costs no further line");
  open(operation, places, kPlacesBytes);
}

// Opens the collective when this rank's arguments lie in shared buffers: those of all ranks, if
// theirs lie in the same ones. `out_bytes`: 0 when only the inputs need to be in reach.
std::optional<SharedArguments> Communicator::shared_arguments(const Operation& operation,
                                                              size_t in_bytes, size_t out_bytes) {
  if (arena_.empty()) return std::nullopt;
  SharedArguments all;
  all.in_buffer = arena_.find(operation.in, in_bytes);
  if (all.in_buffer == nullptr) return std::nullopt;
  const auto place_of = [](const SharedBuffer& buffer, const void* data) {
    return ArenaPlace{buffer.id(),
                      static_cast<uint64_t>(static_cast<const std::byte*>(data) - buffer.own())};
  };
  ArenaPlace places[2] = {place_of(*all.in_buffer, operation.in), {}};
  if (out_bytes > 0) {
    all.out_buffer = arena_.find(operation.out, out_bytes);
    if (all.out_buffer == nullptr) return std::nullopt;
    places[1] = place_of(*all.out_buffer, operation.out);
  }
  open_large(operation, places);
  wait([&] { return permission() == Permission::kGranted ? Step::kDone : Step::kIdle; });
  for (int rank = 0; rank < place_.local_size; ++rank) {
    ArenaPlace theirs[2];
    std::memcpy(theirs, local_.payload(rank, sequence_, sizeof theirs), sizeof theirs);
    if (theirs[0].buffer != places[0].buffer || theirs[1].buffer != places[1].buffer)
      return std::nullopt;
    all.in.push_back(all.in_buffer->data(rank) + theirs[0].offset);
    if (out_bytes > 0) all.out.push_back(all.out_buffer->data(rank) + theirs[1].offset);
  }
  return all;
}

// On one node, when all have entered.
void Communicator::run_directly(const Operation& operation,
                                const std::function<void(const PipelineContext&)>& work) {
  const PipelineContext context = pipeline_context(0, operation);
  DirectWork direct(context, [&] { work(context); });
  wait([&] { return direct.step(); });
  finish_steps(1);
}

// True when the allreduce is done.
bool Communicator::allreduce_in_place(const Operation& operation) {
  const size_t bytes = operation.bytes();
  const std::optional<SharedArguments> shared = shared_arguments(operation, bytes, bytes);
  if (!shared) return false;
  const WirePlan plan = wire_plan(bytes);
  const PipelineContext context = pipeline_context(plan.leaders, operation);
  if (place_.node_count == 1) {
    DirectAllreduce direct(context, *shared, operation.count, operation.reduction,
                           place_.local_size > local_.cores());
    wait([&] { return direct.step(); });
    finish_steps(1);
  } else {
    const Chunking chunking(operation.count, operation.reduction.element_bytes, plan.step_bytes);
    AllreducePipeline pipeline(context, operation.in, operation.out, chunking, operation.reduction,
                               started_wire(plan, operation));
    pipeline.read_in_place(shared->in);
    run_pipeline(pipeline, operation, chunking.steps);
  }
  return true;
}

void Communicator::large_allreduce(const Operation& operation) {
  if (allreduce_in_place(operation)) return;
  const WirePlan plan = wire_plan(operation.bytes());
  const Chunking chunking(operation.count, operation.reduction.element_bytes, plan.step_bytes);
  AllreducePipeline pipeline(staged_context(plan.leaders, operation), operation.in, operation.out,
                             chunking, operation.reduction, started_wire(plan, operation));
  run_pipeline(pipeline, operation, chunking.steps);
}

// A message carries the whole step of a broadcast.
size_t Communicator::broadcast_step_bytes() const {
  const bool chosen = place_.node_count > 1 && options_.wire_chunk_bytes == 0;
  return chosen ? std::min(chunk_bytes_, kMessageBytes) : step_bytes();
}

// True when the broadcast is done.
bool Communicator::broadcast_in_place(const Operation& operation) {
  if (place_.node_count > 1) return false;
  const size_t bytes = operation.bytes();
  const std::optional<SharedArguments> shared = shared_arguments(operation, bytes, bytes);
  if (!shared) return false;
  run_directly(operation, [&](const PipelineContext& context) {
    broadcast_part(context, *shared, operation.root, bytes, copy_);
  });
  return true;
}

void Communicator::large_broadcast(const Operation& operation) {
  if (broadcast_in_place(operation)) return;
  const Chunking chunking(operation.count, operation.reduction.element_bytes,
                          broadcast_step_bytes());
  TreeBroadcast* wire = tree_.get();
  if (wire != nullptr) {
    wire->start(place_.node_of_rank[static_cast<size_t>(operation.root)],
                operation.bytes() >= kChainBytes);
  }
  BroadcastPipeline pipeline(staged_context(place_.leaders, operation), operation.out, chunking,
                             operation.reduction.element_bytes, copy_,
                             local_rank_of(operation.root), wire);
  run_pipeline(pipeline, operation, chunking.steps);
}

// This rank needs nothing any more of the steps so far, whatever part it had in them.
void Communicator::finish_steps(uint64_t steps) {
  base_ += steps;
  for (auto member :
       {&Progress::staged, &Progress::reduced, &Progress::exchanged, &Progress::gathered}) {
    local_.publish(member, base_);
  }
}

// --- waiting ---

// Called now and then while this rank waits; the first call starts the deadline, which costs the
// fast path nothing.
void Communicator::check() {
  if (!deadline_) {
    const bool background = background_.load() == std::this_thread::get_id();
    deadline_.emplace(options_.timeout_s, background ? nullptr : options_.interrupted);
  }
  if (stop_waiting_ || deadline_->interrupted())
    throw Error(HSGD_ERR_INTERRUPTED, -1, what() + text(": rank %d was interrupted", place_.rank));
  if (setup_watch_ != nullptr) setup_watch_->check();
  check_left_out(local_);
  local_.see_who_waits(sequence_);
  local_.check_peers(sequence_, what());
  const Parting* parted = who_parted();
  if (!deadline_->passed() && parted == nullptr) return;
  int first = -1;
  const std::string who = local_.missing(sequence_, &first);
  // Deadlines pass on all nodes at about the same time; the cause may be a rank of this one.
  const bool is_late = static_cast<double>(deadline_->remaining_ns()) < 1e8 * options_.timeout_s;
  if (parted != nullptr && (parted->closed != 0 || !is_late || first < 0)) {
    throw Error(HSGD_ERR_PEER_LOST, parted->rank,
                what() + (parted->closed != 0 ? ": " : ": another node gave up: ") + parted->line);
  }
  const std::string late =
      what() + text(": not finished within %g s: %s; ", options_.timeout_s, who.c_str());
  if (options_.late == nullptr)
    throw Error(HSGD_ERR_TIMEOUT, first, late + "raise HSGD_TIMEOUT_S if this is expected");
  if (local_.is_first_that_waits()) {  // on each node: no node knows whether others wait, too
    options_.late((late + "waiting on (HSGD_TIMEOUT_S makes this an error)").c_str());
  }
  deadline_ = deadline_->renewed(options_.timeout_s);
}

// A node that takes no part in this collective; nullptr while this leader knows of none.
const Parting* Communicator::who_parted() {
  if (transport_ == nullptr) return nullptr;
  Parting heard;
  while (transport_->heard(&heard)) {
    if (!parting_ || heard.sequence < parting_->sequence) parting_ = heard;
  }
  return parting_ && parting_->sequence <= sequence_ ? &*parting_ : nullptr;
}

void Communicator::check_alive(int rank, const std::string& what) const {
  const int local_rank = local_rank_of(rank);
  if (local_rank != place_.local_rank) local_.check_alive(local_rank, what);
}

std::string Communicator::what() const {
  if (first_sequence_ == 0) return "set-up";
  return describe_call(sequence_ - first_sequence_, current_, label_);
}

// --- start-up measurement ---

void Communicator::meet_on_node() {
  ++sequence_;
  open_seen_ = 0;
  local_.open(sequence_, current_, nullptr, nullptr, 0);
  wait([&] { return headers_open() ? Step::kDone : Step::kIdle; });
}

// A small allreduce over the ranks of this node, for what they must decide alike.
void Communicator::agree_on_node(double* values, uint64_t count, hsgd_op op) {
  Operation operation;
  operation.signature = Signature::pack(Kind::kAllreduce, HSGD_FLOAT64, op, 0, count, 0);
  operation.in = operation.out = values;
  operation.count = count;
  operation.reduction = {select_reduce(HSGD_FLOAT64, op, isa_), copy_, sizeof(double), 1.0};
  ++sequence_;
  open_seen_ = 0;
  small_on_node(operation);
}

// Payload of one pipeline step inside the node; the rings hold chunk_bytes_.
size_t Communicator::node_step_bytes() const {
  return std::min(chunk_bytes_, round_up(tuning_.chunk_bytes, kChunkUnit));
}

size_t Communicator::step_bytes() const {
  return place_.node_count == 1 ? node_step_bytes() : chunk_bytes_;
}

// The same of collectives whose ranks have different parts, each of which has its place in a step.
size_t Communicator::block_step_bytes() const {
  return std::max(step_bytes(), least_block_step_bytes(map_));
}

// Seconds of one allreduce inside the node, for each tuning in turn; the slowest rank's.
std::vector<double> Communicator::measure(size_t bytes, const std::vector<Tuning>& tunings) {
  constexpr int kRounds = 5;
  constexpr int kSmallCalls = 8;  // short ones are measured together
  constexpr size_t kSmallBytes = 64 << 10;
  const uint64_t count = bytes / sizeof(float);
  const std::vector<float> in(count, 1.0f);
  std::vector<float> out(count);
  Operation operation;
  operation.signature = current_;
  operation.in = in.data();
  operation.out = out.data();
  operation.count = count;
  operation.reduction = {select_reduce(HSGD_FLOAT32, HSGD_SUM, isa_), copy_, sizeof(float), 1.0};
  const Tuning own = tuning_;
  std::vector<double> best_s(tunings.size(), 1e9);
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < tunings.size(); ++i) {
      tuning_ = tunings[i];
      meet_on_node();
      const int calls = bytes < kSmallBytes ? kSmallCalls : 1;
      const int64_t start = now_ns();
      for (int call = 0; call < calls; ++call) {
        ++sequence_;
        open_seen_ = 0;
        if (bytes <= tuning_.oneshot_bytes) {
          small_on_node(operation);
        } else {
          pipeline_on_node(operation);
        }
      }
      best_s[i] = std::min(best_s[i], static_cast<double>(now_ns() - start) * 1e-9 / calls);
    }
  }
  tuning_ = own;
  agree_on_node(best_s.data(), best_s.size(), HSGD_MAX);
  return best_s;
}

// An allreduce of the ranks of this node alone.
void Communicator::pipeline_on_node(const Operation& operation) {
  const Chunking chunking(operation.count, operation.reduction.element_bytes, node_step_bytes());
  AllreducePipeline pipeline({local_, base_, options_.slots, 0, tuning_.store, Store::kOrdinary,
                              &counters_.intra_bytes, nullptr},
                             operation.in, operation.out, chunking, operation.reduction, nullptr);
  constexpr ArenaPlace kPrivate[2] = {};
  wait([&] { return pipeline.stage_first() ? Step::kDone : Step::kIdle; });
  open_large(operation, kPrivate);
  wait([&] { return pipeline.step(headers_open() ? Permission::kGranted : Permission::kUnknown); });
  finish_steps(chunking.steps);
}

// What is faster depends on the machine, and on one virtual machine even on the hour (whether cores
// share a cache): it is measured, with the collectives themselves, in some milliseconds.
void Communicator::tune() {
  constexpr uint64_t kCountedCollectives = 4096;
  static_assert(kCountedCollectives % kCells == 0);
  current_ = Signature::pack(Kind::kBarrier, HSGD_UINT8, HSGD_SUM, 0, 0, 0);
  if (place_.local_size > 1) {
    hsgd_options options = options_;
    if (place_.node_count > 1) {  // fixed, see cell_bytes_for()
      options.oneshot_bytes = static_cast<int64_t>(tuning_.oneshot_bytes);
      options.chunk_bytes = static_cast<int64_t>(tuning_.chunk_bytes);
    }
    if (options.known_store != 0) {
      tuning_.store = options.known_store == 2 ? Store::kNonTemporal : Store::kOrdinary;
    } else {
      tuning_ =
          choose_tuning(options, place_.local_size > local_.cores(),
                        [&](size_t bytes, const auto& tunings) { return measure(bytes, tunings); });
    }
    // So that the jump below skips no cell that somebody still reads.
    while (sequence_ % kCells != 0) meet_on_node();
  }
  counters_ = {};
  wait_ticks_ = 0;
  // Nodes measure more or less, or nothing, but count alike: headers between nodes carry the
  // sequence.
  HSGD_CHECK(sequence_ <= kCountedCollectives);
  first_sequence_ = sequence_ = kCountedCollectives;
}

}  // namespace hsgd
