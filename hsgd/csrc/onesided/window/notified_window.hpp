// NotifiedWindow: gives every rank a segment that others write into, and slots that notify it.
//
// A write is the data, then a version number in a slot of the target, which overwrites the previous
// one: inside a node by memcpy, store and doorbell, between nodes through the Outbox. The versions
// of a slot grow, so a reader that missed one has missed nothing. Has no barrier and no thread.
// Source: GASPI's notifications, as used by CaffeGPI (arXiv:1706.00095); the forms here are our
// reconstruction.
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

// The beginning of each segment, before the slots and the data.
struct WindowHeader {
  // The number of threads of a rank that may wait at a time, each at its own bell.
  static constexpr size_t kBells = 4;
  Doorbell bells[kBells];
  alignas(64) std::atomic<uint32_t> closed;  // written by the owner
};
// A slot; each has one writer and one cache line. Written by another rank, or by MPI on its behalf.
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
    uint32_t queue;    // operations between nodes that may be in progress
    double timeout_s;  // time after which an undelivered put is an error
    bool remote_only;  // use the network inside the node, too: for measurements and tests
    bool forgiving;  // an undelivered write stays in progress and is no error; if the death of its
                     // target is known, it is dropped
  };
  // `make`: returns the network's view of this rank's whole segment; collective over all ranks;
  // empty if all ranks share a node.
  using MakeRma = std::function<std::unique_ptr<Rma>(void* base, size_t bytes)>;

  // Creates the window; all ranks must call it. `communicator` must outlive this object.
  NotifiedWindow(Communicator& communicator, const Settings& settings, const MakeRma& make);
  // Closes the window; collective over MPI, unless abandoned.
  ~NotifiedWindow();
  NotifiedWindow(const NotifiedWindow&) = delete;
  NotifiedWindow& operator=(const NotifiedWindow&) = delete;

  // Writes the pieces, then the version. Returns a ticket; 0: already done. `order`: among writes
  // that wait for one target the lowest goes first, if the network keeps an order; one value per
  // slot.
  uint64_t put_notify(const std::vector<Piece>& pieces, int target, uint32_t slot, uint64_t version,
                      double timeout_s, uint32_t order = 0);
  bool keeps_order() const { return outbox_ != nullptr && outbox_->drives_itself(); }
  bool done(uint64_t ticket);
  // Returns the same as done() without driving the network; for callers that drive it anyway.
  bool delivered(uint64_t ticket) const { return outbox_ == nullptr || outbox_->done(ticket); }
  void drain(double timeout_s);
  // wait_any(): returns the first of `slots` with a version above its entry of `seen`.
  struct Seen {
    uint32_t slot;
    uint64_t version;
  };
  Seen wait_any(const std::vector<Seen>& slots, double timeout_s);

  // Waits as wait_any(), for the one thread of a rank that handles all notifications. Has no
  // deadline, because the program may compute for any time; returns kNoSlot if `also` returns true.
  // `calm`: nothing is expected from other nodes, so it checks the network less often.
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  Seen work_any(const std::vector<Seen>& slots, const std::function<bool()>& also, bool calm);
  // Ends work_any() with HSGD_ERR_CLOSED, permanently.
  void end_work();
  // Makes the destructor wait for no rank: memory that MPI uses stays until the process ends.
  void abandon();
  // Sets whether such a thread exists. While it does, other waiting threads leave the network to
  // it, and it notifies them with wake() of what arrived.
  void set_worked(bool worked) { worked_.store(worked, std::memory_order_relaxed); }
  void wake();
  uint64_t test(uint32_t slot);
  uint64_t reset(uint32_t slot);
  // Declares that only `source` notifies the slot: errors name it, and its death ends a wait.
  void bind(uint32_t slot, int source);

  // Returns the data of a rank of this node, this one included; nullptr for other nodes.
  std::byte* segment(int rank) const;
  const std::shared_ptr<SharedBuffer>& memory() const { return memory_; }
  const Settings& settings() const { return settings_; }
  // Returns the descriptor that a forked child should close; see Rma.
  int descriptor() const { return outbox_ == nullptr ? -1 : outbox_->descriptor(); }
  bool is_mine() const { return communicator_.is_mine(); }
  int name(int rank) const { return communicator_.place().names.of(rank); }  // in errors

 private:
  class Patience;
  class Awaiting;
  struct Expected {
    int source = -1;
    std::atomic<uint64_t> last{0};  // the version that this rank saw last; for errors only
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
  // `network_ns`: the interval between checks of the network; 0: none.
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
  std::atomic<bool> ended_{false};   // partner: work_any(); orders no other data
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_WINDOW_NOTIFIED_WINDOW_HPP_
