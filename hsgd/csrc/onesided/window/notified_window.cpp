// NotifiedWindow: creates segments and slots, writes, and waits.
#include "onesided/window/notified_window.hpp"

#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// The network rings no bell: a waiting rank checks it at this interval.
constexpr int64_t kLookNs = 200'000;
constexpr int64_t kCalmNs = 2'000'000;
constexpr int64_t kQuietNs = 20'000'000;

// Sleep without spinning: the program computes meanwhile, perhaps on the same core.
constexpr WaitPolicy kAtOnce{0, 0};

unsigned long long number(uint64_t value) { return value; }

std::shared_ptr<SharedBuffer> allocate(Communicator& communicator,
                                       const NotifiedWindow::Settings& settings, size_t bytes) {
  const int64_t shape[] = {static_cast<int64_t>(settings.segment_bytes), settings.slots};
  const hsgd_label label = {"window", shape, 2};
  return communicator.allocate(bytes, HSGD_UINT8, false, &label);
}

}  // namespace

// Ends a wait early: by deadline, interrupt or the loss of a source.
class NotifiedWindow::Patience final : public Watch {
 public:
  using Explain = std::function<void()>;  // throws

  Patience(const NotifiedWindow& window, double timeout_s, const std::vector<Seen>* slots,
           std::string what, Explain explain)
      : window_(window),
        deadline_(timeout_s, window.communicator_.options().interrupted),
        slots_(slots),
        what_(std::move(what)),
        explain_(std::move(explain)) {}

  void check() override {
    for (const int source : window_.sources_of(slots_)) window_.check_source(source, what_);
    if (deadline_.interrupted()) {
      throw Error(HSGD_ERR_INTERRUPTED, -1,
                  what_ + text(": rank %d was interrupted", window_.name(window_.place_.rank)));
    }
    if (deadline_.passed()) explain_();
  }
  bool passed() const { return deadline_.passed(); }

 private:
  const NotifiedWindow& window_;
  Deadline deadline_;
  const std::vector<Seen>* slots_;  // nullptr: none
  std::string what_;
  Explain explain_;
};

// While it exists, a thread waits for tickets and must be woken for them.
class NotifiedWindow::Awaiting {
 public:
  explicit Awaiting(Outbox& outbox) : outbox_(outbox) { outbox_.await_tickets(1); }
  ~Awaiting() { outbox_.await_tickets(-1); }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  Outbox& outbox_;
};

NotifiedWindow::NotifiedWindow(Communicator& communicator, const Settings& settings,
                               const MakeRma& make)
    : communicator_(communicator),
      settings_(settings),
      place_(communicator.topology()),
      memory_(allocate(communicator, settings, data_offset() + settings.segment_bytes)),
      expected_(settings.slots) {
  for (Doorbell& bell : header(own()).bells) bell.rings.store(first_count_32());
  if (make) {
    outbox_ = std::make_unique<Outbox>(make(memory_->own(), data_offset() + settings.segment_bytes),
                                       settings.queue, settings.timeout_s, settings.forgiving,
                                       communicator.place().names);
    outbox_->start([this] { wake(); });
  }
  // No rank may write here before the network's view exists, nor notify a rank that is not ready.
  communicator_.barrier();
}

NotifiedWindow::~NotifiedWindow() {
  header(own()).closed.store(1, std::memory_order_seq_cst);  // partner: check_source()
  for (int peer = 0; peer < place_.local_size; ++peer) {
    for (Doorbell& bell : header(peer).bells) ring(bell);
  }
  if (outbox_ == nullptr || outbox_->close(Deadline(settings_.timeout_s))) return;
  // The network may still read and write this memory: it stays until the process ends.
  new std::shared_ptr<SharedBuffer>(memory_);
}

size_t NotifiedWindow::data_offset() const {
  return round_up(slot_offset(settings_.slots), kPartUnit);
}

std::byte* NotifiedWindow::segment(int rank) const {
  const int peer = communicator_.local_rank_of(rank);
  return peer < 0 ? nullptr : memory_->data(peer) + data_offset();
}

// --- writing ---

uint64_t NotifiedWindow::put_notify(const std::vector<Piece>& pieces, int target, uint32_t slot,
                                    uint64_t version, double timeout_s, uint32_t order) {
  check_mine();
  check_put(pieces, target, slot);
  const uint64_t before = claim_version(target, slot, version);
  const int peer = settings_.remote_only ? -1 : communicator_.local_rank_of(target);
  if (peer >= 0) {
    for (const Piece& piece : pieces) {
      std::byte* there = memory_->data(peer) + data_offset() + piece.offset;
      if (there != piece.data && piece.bytes > 0) std::memmove(there, piece.data, piece.bytes);
    }
    // Partner: look(). Forbids that the target sees the version before the data; sequentially
    // consistent because ring() must not look at `asleep` before the store is visible.
    slot_of(peer, slot).version.store(version, std::memory_order_seq_cst);
    for (Doorbell& bell : header(peer).bells) ring(bell);
    return 0;
  }
  std::vector<Piece> placed = pieces;
  for (Piece& piece : placed) piece.offset += data_offset();
  const Notification notification{target, slot, version, slot_offset(slot), order};
  uint64_t ticket = 0;
  if (outbox_->post(placed, notification, &ticket)) return ticket;
  const std::string what =
      text("put_notify, version %llu for slot %u of rank %d", number(version), slot, name(target));
  Patience patience(*this, timeout_s, nullptr, what, [&] {
    int oldest = -1;
    const std::string line = outbox_->oldest(&oldest);
    throw Error(
        HSGD_ERR_QUEUE_FULL, name(oldest),
        what +
            text(": all %u operations between nodes have been under way for %g s, the oldest is ",
                 settings_.queue, timeout_s) +
            line + "; wait longer, drain() before, or make the NotifiedWindow with a longer queue");
  });
  const Awaiting awaiting(*outbox_);
  try {
    wait([&] { return outbox_->post(placed, notification, &ticket) ? Step::kDone : Step::kIdle; },
         patience, kLookNs, communicator_.node().wait_policy());
  } catch (const Error&) {
    give_version_back(target, slot, version, before);
    throw;
  }
  return ticket;
}

// Returns an unsent version for reuse, unless another thread has claimed a later one: no lower
// version may follow that.
void NotifiedWindow::give_version_back(int target, uint32_t slot, uint64_t version,
                                       uint64_t before) {
  const std::lock_guard<std::mutex> lock(sent_mutex_);
  uint64_t& last = sent_[static_cast<uint64_t>(target) << 32 | slot];
  if (last == version) last = before;
}

void NotifiedWindow::check_mine() const {
  if (communicator_.is_mine()) return;
  throw_error(
      HSGD_ERR_CLOSED, -1,
      "this NotifiedWindow belongs to the process that made it; a forked child cannot use it");
}

void NotifiedWindow::check_slot(const char* what, uint32_t slot, int rank) const {
  if (slot < settings_.slots) return;
  throw_error(HSGD_ERR_ARGUMENT, name(rank),
              "%s: slot %u of rank %d: there are slots 0 to %u; make the NotifiedWindow with "
              "more slots",
              what, slot, name(rank), settings_.slots - 1);
}

void NotifiedWindow::check_put(const std::vector<Piece>& pieces, int target, uint32_t slot) const {
  if (target < 0 || target >= place_.size) {
    throw_error(HSGD_ERR_ARGUMENT, target, "put_notify: rank %d is not a rank; ranks are 0 to %d",
                target, place_.size - 1);
  }
  check_slot("put_notify", slot, target);
  for (const Piece& piece : pieces) {
    if (piece.offset <= settings_.segment_bytes &&
        piece.bytes <= settings_.segment_bytes - piece.offset)
      continue;
    throw_error(HSGD_ERR_ARGUMENT, name(target),
                "put_notify: %llu bytes at offset %llu do not fit in the segment of rank %d, "
                "which has %llu bytes",
                number(piece.bytes), number(piece.offset), name(target),
                number(settings_.segment_bytes));
  }
}

// Claims the version and returns the previous one.
uint64_t NotifiedWindow::claim_version(int target, uint32_t slot, uint64_t version) {
  const std::lock_guard<std::mutex> lock(sent_mutex_);
  uint64_t& last = sent_[static_cast<uint64_t>(target) << 32 | slot];
  if (version <= last) {
    throw_error(HSGD_ERR_ARGUMENT, name(target),
                "put_notify: slot %u of rank %d: version %llu does not follow %llu, which this "
                "rank sent before; versions of a slot start at 1 and must increase",
                slot, name(target), number(version), number(last));
  }
  return std::exchange(last, version);
}

bool NotifiedWindow::done(uint64_t ticket) {
  check_mine();
  if (outbox_ == nullptr) return true;
  outbox_->drive();
  return ticket == 0 || outbox_->done(ticket);
}

void NotifiedWindow::drain(double timeout_s) {
  check_mine();
  if (outbox_ == nullptr) return;
  Patience patience(*this, timeout_s, nullptr, "drain", [&] {
    int oldest = -1;
    const std::string line = outbox_->oldest(&oldest);
    throw Error(
        HSGD_ERR_TIMEOUT, name(oldest),
        text("drain: after %g s not everything was delivered, the oldest is ", timeout_s) + line);
  });
  const Awaiting awaiting(*outbox_);
  wait([&] { return outbox_->empty() ? Step::kDone : Step::kIdle; }, patience, kLookNs,
       communicator_.node().wait_policy());
}

// --- waiting ---

NotifiedWindow::Seen NotifiedWindow::wait_any(const std::vector<Seen>& slots, double timeout_s) {
  check_slots("wait_any", slots);
  Seen found{};
  const bool network = outbox_ != nullptr && !worked_.load(std::memory_order_relaxed);
  if (network) outbox_->drive();
  if (find(slots, &found)) return found;
  const std::string what = text("wait_any, slot %u", slots.front().slot);
  Patience patience(*this, timeout_s, &slots, what, [&] {
    throw Error(HSGD_ERR_TIMEOUT, name(expected_[slots.front().slot].source),
                text("wait_any: after %g s ", timeout_s) + missing(slots));
  });
  const auto look_at_all = [&] { return find(slots, &found) ? Step::kDone : Step::kIdle; };
  if (patience.passed() && check_once(look_at_all, patience) == Step::kDone) return found;
  // If a thread of this rank works on notifications, it may need this core.
  const WaitPolicy policy =
      worked_.load(std::memory_order_relaxed) ? kAtOnce : communicator_.node().wait_policy();
  wait(look_at_all, patience, network ? kLookNs : 0, policy);
  return found;
}

NotifiedWindow::Seen NotifiedWindow::work_any(const std::vector<Seen>& slots,
                                              const std::function<bool()>& also, bool calm) {
  constexpr double kForever = 1e9;  // seconds
  check_slots("work_any", slots);
  Seen found{kNoSlot, 0};
  Patience patience(*this, kForever, &slots, "waiting for any rank", [] {});
  wait(
      [&] {
        if (find(slots, &found)) return Step::kDone;
        found = {kNoSlot, 0};
        if (ended_.load(std::memory_order_seq_cst)) {
          throw_error(HSGD_ERR_CLOSED, -1, "this NotifiedWindow is closed");
        }
        return also() ? Step::kDone : Step::kIdle;
      },
      patience, calm ? kCalmNs : kLookNs, kAtOnce);
  return found;
}

void NotifiedWindow::abandon() {
  if (outbox_ != nullptr) outbox_->abandon();
}

void NotifiedWindow::end_work() {
  ended_.store(true, std::memory_order_seq_cst);
  wake();
}

void NotifiedWindow::wake() {
  // Orders the caller's reads from the network before the read of `asleep`; see ring().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (Doorbell& bell : header(own()).bells) ring(bell);
}

void NotifiedWindow::check_slots(const char* what, const std::vector<Seen>& slots) const {
  check_mine();
  if (slots.empty()) throw_invalid("%s: no slots; give at least one", what);
  for (const Seen& entry : slots) check_slot(what, entry.slot, place_.rank);
}

std::set<int> NotifiedWindow::sources_of(const std::vector<Seen>* slots) const {
  std::set<int> sources;
  if (slots == nullptr) return sources;
  for (const Seen& entry : *slots) {
    const int source = expected_[entry.slot].source;
    if (source >= 0) sources.insert(source);
  }
  return sources;
}

bool NotifiedWindow::find(const std::vector<Seen>& slots, Seen* found) {
  for (const Seen& entry : slots) {
    *found = {entry.slot, look(entry.slot)};
    if (found->version > entry.version) return true;
  }
  return false;
}

uint64_t NotifiedWindow::test(uint32_t slot) {
  check_mine();
  check_slot("test", slot, place_.rank);
  if (outbox_ != nullptr) outbox_->drive();
  return look(slot);
}

uint64_t NotifiedWindow::look(uint32_t slot) {
  Expected& expected = expected_[slot];
  for (;;) {
    // Partner: the window below, by another thread. Before the version, which is then as new as
    // the one that the other thread saw.
    uint64_t last = expected.last.load(std::memory_order_acquire);
    // Partner: the store in put_notify(), or MPI's replacement. The acquire forbids that the data
    // is read before the version; MPI_Win_sync in drive() says the same to MPI.
    const uint64_t version = slot_of(own(), slot).version.load(std::memory_order_acquire);
    if (version > last) {
      // Must not overwrite a 0 that reset() stored meanwhile.
      expected.last.compare_exchange_strong(last, version, std::memory_order_acq_rel);
    }
    if (version >= last) return version;
    if (expected.last.load(std::memory_order_acquire) != last) continue;  // reset meanwhile
    throw_error(HSGD_ERR_ARGUMENT, name(expected.source),
                "slot %u of rank %d went from version %llu back to %llu: two ranks notify it; "
                "give each writer a slot of its own",
                slot, name(place_.rank), number(last), number(version));
  }
}

uint64_t NotifiedWindow::reset(uint32_t slot) {
  check_mine();
  check_slot("reset", slot, place_.rank);
  if (outbox_ != nullptr) outbox_->drive();
  expected_[slot].last.store(0, std::memory_order_release);
  // Partner: put_notify(). One operation, so that no version is lost between the read and the zero;
  // acquire for the data that comes with the version.
  return slot_of(own(), slot).version.exchange(0, std::memory_order_acq_rel);
}

void NotifiedWindow::bind(uint32_t slot, int source) {
  check_slot("bind", slot, place_.rank);
  if (source < 0 || source >= place_.size) {
    throw_error(HSGD_ERR_ARGUMENT, source, "bind: rank %d is not a rank; ranks are 0 to %d", source,
                place_.size - 1);
  }
  expected_[slot].source = source;
}

// Throws if the source has died or has closed its NotifiedWindow, because it then notifies no rank
// any more.
void NotifiedWindow::check_source(int source, const std::string& what) const {
  const int peer = communicator_.local_rank_of(source);
  if (outbox_ != nullptr && outbox_->lost(source)) {
    throw Error(HSGD_ERR_PEER_LOST, name(source),
                what + ": " + person(source) + " died or closed its NotifiedWindow");
  }
  if (peer < 0) return;
  if (peer != own()) communicator_.node().check_alive(peer, what);
  if (header(peer).closed.load(std::memory_order_acquire) == 0) return;
  throw Error(HSGD_ERR_PEER_LOST, name(source),
              what + ": " + person(source) + " closed its NotifiedWindow");
}

std::string NotifiedWindow::person(int rank) const {
  const int peer = communicator_.local_rank_of(rank);
  return peer < 0 ? text("rank %d on another node", name(rank)) : communicator_.node().person(peer);
}

std::string NotifiedWindow::missing(const std::vector<Seen>& slots) const {
  std::string words;
  for (const Seen& entry : slots) {
    const int source = expected_[entry.slot].source;
    if (!words.empty()) words += ", ";
    words += text("slot %u of rank %d", entry.slot, name(place_.rank));
    words += source < 0 ? std::string() : ", which " + person(source) + " notifies,";
    words += text(" has nothing later than version %llu", number(entry.version));
  }
  // The awaited rank may itself wait for data that has not arrived.
  const int target = outbox_ == nullptr ? -1 : outbox_->oldest_target();
  if (target >= 0)
    words += "; the oldest put of this rank is still on its way to " + person(target);
  return words;
}

size_t NotifiedWindow::take_bell() {
  for (size_t bell = 0; bell < bell_taken_.size(); ++bell) {
    // Threads of this process only: forbids that one clears the `asleep` of another.
    if (!bell_taken_[bell].exchange(true, std::memory_order_acquire)) return bell;
  }
  throw_invalid(
      "%zu threads wait on this NotifiedWindow already; wait for several slots in one of "
      "them",
      bell_taken_.size());
}

template <class StepFunction>
void NotifiedWindow::wait(StepFunction&& step, Watch& watch, int64_t network_ns,
                          const WaitPolicy& policy) {
  struct Taken {
    std::atomic<bool>& taken;
    ~Taken() { taken.store(false, std::memory_order_release); }
  };
  const size_t bell = take_bell();
  const Taken taken{bell_taken_[bell]};
  const bool looks = outbox_ != nullptr && network_ns > 0;
  const bool rings = outbox_ == nullptr || outbox_->drives_itself();
  WaitPolicy waiting = policy;
  waiting.all_rings = rings;  // MPI rings no bell, also if another thread checks it for this one
  Waiter waiter(header(own()).bells[bell], waiting);
  waiter.run(
      [&] {
        if (looks) outbox_->drive();
        return step();
      },
      watch, looks && !rings ? network_ns : kQuietNs);
}

}  // namespace hsgd
