// Notified window: every rank has a segment that others write into, and slots that tell it so.
//
// Owns the segments, the slots and waiting for them. A write is the data, then a version number in
// a slot of the target, which overwrites the one before: inside a node memcpy, store and doorbell,
// between nodes through the Outbox. Versions of a slot grow, so a reader that missed one has missed
// nothing. Has no barrier and no thread. Source: GASPI's notifications, as used by CaffeGPI
// (arXiv:1706.00095); the forms here are our reconstruction.
#ifndef HSGD_ONESIDED_WINDOW_NOTIFIED_WINDOW_HPP_
#define HSGD_ONESIDED_WINDOW_NOTIFIED_WINDOW_HPP_

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "onesided/window/put_queue.hpp"

namespace hsgd {

// What lies at the beginning of each segment, before the slots and the data.
struct WindowHeader {
  // As many threads of a rank may wait at a time, each at its own bell.
  static constexpr size_t kBells = 4;
  Doorbell bells[kBells];
  alignas(64) std::atomic<uint32_t> closed;  // written by the owner
};
// One writer and one cache line each; written by another rank, or by MPI in its name.
struct alignas(64) NotifySlot {
  std::atomic<uint64_t> version;  // 0: none
};
static_assert(sizeof(NotifySlot) == 64 && std::atomic<uint64_t>::is_always_lock_free,
              "MPI replaces the version as a plain 64-bit integer");

class HSGD_API NotifiedWindow final {
 public:
  struct Settings {
    uint64_t segment_bytes;
    uint32_t slots;
    uint32_t queue;    // operations between nodes that may be under way
    double timeout_s;  // until a put that was not delivered is an error
    bool remote_only;  // inside the node too: for measurements and tests
    bool forgiving;    // what a target does not take stays under way, or goes with the target where
                       // its death is known, and breaks nothing
  };
  // `make`: collective over all ranks, the network's view of this rank's whole segment; none where
  // all ranks share a node.
  using MakeRma = std::function<std::unique_ptr<Rma>(void* base, size_t bytes)>;

  // Collective. `communicator` outlives this object.
  NotifiedWindow(Communicator& communicator, const Settings& settings, const MakeRma& make);
  // Collective over MPI, unless abandoned.
  ~NotifiedWindow();
  NotifiedWindow(const NotifiedWindow&) = delete;
  NotifiedWindow& operator=(const NotifiedWindow&) = delete;

  // Writes the pieces, then the version. The ticket is 0 when it is done at once. `order`: of what
  // waits for one target the least goes first, where the network keeps an order; one for each slot.
  uint64_t put_notify(const std::vector<Piece>& pieces, int target, uint32_t slot, uint64_t version,
                      double timeout_s, uint32_t order = 0);
  bool keeps_order() const { return outbox_ != nullptr && outbox_->drives_itself(); }
  bool done(uint64_t ticket);
  // As done(), but does not drive the network: for callers that wait in it anyway.
  bool delivered(uint64_t ticket) const { return outbox_ == nullptr || outbox_->done(ticket); }
  void drain(double timeout_s);
  // The first of `slots` whose version is above its entry of `seen`.
  struct Seen {
    uint32_t slot;
    uint64_t version;
  };
  Seen wait_any(const std::vector<Seen>& slots, double timeout_s);

  // For the one thread of a rank that works on whatever comes: as wait_any, but without a deadline,
  // because it waits for as long as the program computes, and ended by `also` too, with kNoSlot.
  // `calm`: nothing is expected from other nodes, so it looks there less often.
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  Seen work_any(const std::vector<Seen>& slots, const std::function<bool()>& also, bool calm);
  // Ends that, with HSGD_ERR_CLOSED, for good.
  void end_work();
  // The destructor will wait for nobody: what MPI has of this rank stays until the process ends.
  void abandon();
  // While there is such a thread, others that wait leave the network to it. It tells them with
  // wake() what came from there.
  void set_worked(bool worked) { worked_.store(worked, std::memory_order_relaxed); }
  void wake();
  uint64_t test(uint32_t slot);
  uint64_t reset(uint32_t slot);
  // Only `source` will notify the slot: errors name it, and its death ends a wait.
  void bind(uint32_t slot, int source);

  // The data of a rank of this node, this one included; nullptr: on another node.
  std::byte* segment(int rank) const;
  const std::shared_ptr<SharedBuffer>& memory() const { return memory_; }
  const Settings& settings() const { return settings_; }
  // What a child of fork should not keep; see Rma.
  int descriptor() const { return outbox_ == nullptr ? -1 : outbox_->descriptor(); }
  bool is_mine() const { return communicator_.is_mine(); }

 private:
  class Patience;
  class Awaiting;
  struct Expected {
    int source = -1;
    std::atomic<uint64_t> last{0};  // as this rank saw it; for errors only
  };

  WindowHeader& header(int local_rank) const {
    return *reinterpret_cast<WindowHeader*>(memory_->data(local_rank));
  }
  NotifySlot& slot_of(int local_rank, uint32_t slot) const {
    return *reinterpret_cast<NotifySlot*>(memory_->data(local_rank) + slot_offset(slot));
  }
  size_t slot_offset(uint32_t slot) const {
    return sizeof(WindowHeader) + slot * sizeof(NotifySlot);
  }
  size_t data_offset() const;
  int own() const { return place_.local_rank; }
  void check_mine() const;
  void check_slot(const char* what, uint32_t slot, int rank) const;
  void check_put(const std::vector<Piece>& pieces, int target, uint32_t slot) const;
  uint64_t claim_version(int target, uint32_t slot, uint64_t version);
  void give_version_back(int target, uint32_t slot, uint64_t version, uint64_t before);
  uint64_t look(uint32_t slot);
  void check_source(int source, const std::string& what) const;
  std::string person(int rank) const;
  std::string missing(const std::vector<Seen>& slots) const;
  void check_slots(const char* what, const std::vector<Seen>& slots) const;
  std::set<int> sources_of(const std::vector<Seen>* slots) const;
  bool find(const std::vector<Seen>& slots, Seen* found);
  // `network_ns`: how often to look at the network; 0: not at all.
  template <class StepFunction>
  void wait(StepFunction&& step, Watch& watch, int64_t network_ns, const WaitPolicy& policy);
  size_t take_bell();

  Communicator& communicator_;
  Settings settings_;
  hsgd_topology place_;
  std::shared_ptr<SharedBuffer> memory_;
  std::unique_ptr<Outbox> outbox_;
  std::vector<Expected> expected_;
  std::mutex sent_mutex_;
  std::unordered_map<uint64_t, uint64_t> sent_;  // last version by target and slot
  std::array<std::atomic<bool>, WindowHeader::kBells> bell_taken_{};
  std::atomic<bool> worked_{false};  // a hint between threads of this process
  std::atomic<bool> ended_{false};   // partner: work_any(); says nothing about other data
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_WINDOW_NOTIFIED_WINDOW_HPP_
