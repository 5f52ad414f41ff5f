// LocalGroup: the ranks of one node, their segments and what each has published, and waits for one
// another.
//
// Owns the shared memory, the watch for deaths and the text of "who is missing". Collectives use
// its primitives: cells (header and small payload of one collective), progress counters (chunks of
// large collectives) and ring slots. Never touches user memory; knows nothing of other nodes.
#ifndef HSGD_NODE_SEGMENTS_NODE_GROUP_HPP_
#define HSGD_NODE_SEGMENTS_NODE_GROUP_HPP_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/call_signature.hpp"
#include "core/base/error.hpp"
#include "core/os/process_life.hpp"
#include "core/os/wait.hpp"
#include "node/rendezvous/bootstrap.hpp"
#include "node/segments/combining_tree.hpp"
#include "node/segments/node_memory.hpp"
#include "node/segments/rank_groups.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {

class LocalGroup {
 public:
  struct Settings {
    int rank = 0;  // on this node
    int size = 1;
    std::vector<int> names;  // of this node's ranks in errors
    SegmentLayout layout;
    int flat_ranks = 16;
    bool one_out_ring = false;  // local rank 0 holds the out ring of the whole node
    uint64_t fingerprint = 0;   // hash of all settings that must be equal on all ranks
    std::shared_ptr<ProcessWatch> processes;  // shared with other communicators of the process
    WaitPolicy wait;                          // spin < 0: chosen from ranks and cores
  };

  // Collective over the node, through the socket at `path` (see meet()).
  LocalGroup(const std::string& path, Listener* listener, const Settings& settings,
             const Deadline& deadline);
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  int rank() const { return settings_.rank; }
  int size() const { return settings_.size; }
  int cores() const { return cores_; }  // cores for the ranks of this node; the same on all
  bool shares_cores() const { return size() > cores_; }
  int name(int rank) const { return peers_[static_cast<size_t>(rank)].name; }
  const std::vector<int>& names() const { return settings_.names; }
  uint64_t id() const { return control(0).id; }  // the same on all ranks of this group only
  const SegmentLayout& layout() const { return settings_.layout; }

  // Returns true if ranks are counted in a tree, so that no rank polls all others: if there are
  // more than flat_ranks ranks, and no rank may be further ahead than the tree allows.
  static constexpr size_t kMostSlots = ArrivalCounts::kSteps - 2;
  bool combines() const { return tree_.has_value(); }

  // --- cells: the header and small payload of one collective ---
  // Publishes this rank's header, with up to oneshot_bytes of payload (nullptr: only the header).
  // `cost`: any number below 2^63 for the other ranks; `stop`: asks them to stop. Returns true if
  // ranks are counted and this rank was the last: then it must call tell_opened().
  bool open(uint64_t sequence, const Signature& signature, const hsgd_label* label,
            const void* payload, size_t bytes, const Counts& counts = {}, uint64_t cost = 0,
            bool stop = false);
  bool is_open(int rank, uint64_t sequence) const;
  // For counted ranks: returns true if all have opened the collective and the last one has
  // announced it; differ() returns true if their signatures differ.
  bool all_opened(uint64_t sequence) const { return tree_->reached(Track::kOpened, sequence); }
  bool differ(uint64_t sequence) const;
  void tell_opened(uint64_t sequence);
  const Signature& signature(int rank, uint64_t sequence) const;
  uint64_t cost(int rank, uint64_t sequence) const {
    return cell(rank, sequence).note & ~CellHeader::kStop;
  }
  // Returns true if a rank of the node asked to stop; all headers must be open.
  bool stops(uint64_t sequence) const;
  const std::byte* payload(int rank, uint64_t sequence, size_t bytes) const;
  Call call(int rank, uint64_t sequence) const;  // for messages; the header must be open
  // Returns room for the payload of a cell, in addition to a payload of up to
  // CellHeader::kInlineBytes. The owner fills it before open().
  std::byte* packet(int rank, uint64_t sequence) const {
    return reinterpret_cast<std::byte*>(&cell(rank, sequence)) + kLine;
  }

  // --- result cells, in local rank 0's memory: what one rank publishes for the whole node ---
  std::byte* result_payload(uint64_t sequence, size_t bytes);
  std::byte* result_packets(uint64_t sequence) const {  // as packet()
    return reinterpret_cast<std::byte*>(&result(sequence)) + kLine;
  }
  void publish_result(uint64_t sequence, hsgd_status status, bool stop);
  bool has_result(uint64_t sequence) const;
  hsgd_status result_status(uint64_t sequence) const;
  bool result_stops(uint64_t sequence) const;
  Call (&mismatch())[2];  // in local rank 0's memory

  // --- progress and rings ---
  const Progress& progress(int rank) const { return control(rank).progress; }
  // Returns true if a rank of the node has finished `steps` steps. The acquire pairs with
  // publish(): if the counter is visible, the data that it counts is visible.
  bool rank_reached(int rank, std::atomic<uint64_t> Progress::* member, uint64_t steps) const {
    return (progress(rank).*member).load(std::memory_order_acquire) >= steps;
  }
  // Returns true if all other ranks have finished `steps` steps. In a tree this rank is counted
  // too: it must have finished as many.
  bool peers_reached(std::atomic<uint64_t> Progress::* member, uint64_t steps) const {
    if (tree_) return tree_->reached(track_of(member), steps);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && !rank_reached(peer, member, steps)) return false;
    }
    return true;
  }
  // Returns true if the slot of `step` is free: a rank, or all others, finished the step that used
  // it before.
  bool rank_freed(int rank, std::atomic<uint64_t> Progress::* member, uint64_t step,
                  size_t slots) const {
    return step < slots || rank_reached(rank, member, step + 1 - slots);
  }
  bool peers_freed(std::atomic<uint64_t> Progress::* member, uint64_t step, size_t slots) const {
    return step < slots || peers_reached(member, step + 1 - slots);
  }
  // Stores `value` and wakes the ranks that sleep and may wait for it. `member` is one of this
  // rank's own counters. All ranks reach each value that a rank waits for; only `exchanged` is
  // waited for rank by rank.
  enum class Audience {
    kAll,   // all ranks wait for all
    kSome,  // the same, but only as many ranks as there are cores have work
    kEach,  // the others wait for this rank
  };
  void publish(std::atomic<uint64_t> Progress::* member, uint64_t value,
               Audience audience = Audience::kAll);
  std::byte* in_slot(int rank, uint64_t step) const { return base(rank) + layout().in_slot(step); }
  std::byte* out_slot(int rank, uint64_t step) const {
    return base(rank) + layout().out_slot(step);
  }

  // --- parts of one collective that any rank can take ---
  // Returns the next free part of `parts` for this rank; nothing if all are taken.
  std::optional<uint64_t> claim(uint64_t parts);
  void finish_claim(uint64_t parts);  // wakes all ranks after the last part
  bool claims_finished(uint64_t parts) const;
  void end_claims(uint64_t parts) { claims_base_ += parts; }

  // --- meetings of the ranks of this node, at a path that no other process can guess or has seen
  // --- Draws the path. Call it on local rank 0 before a collective; after it all ranks may ask for
  // the path. They must have met before the next call.
  void appoint_meeting();
  std::string next_meeting() const;

  // --- waiting ---
  Waiter& waiter() { return waiter_; }
  // Returns how ranks of this node should wait, on any doorbell.
  const WaitPolicy& wait_policy() const { return policy_; }
  // Throws PeerLost if a rank of the node died, or left before this collective. Throws the error
  // with which another rank gave up in this or an earlier collective. `what` begins the text.
  // kAnySequence: outside of collectives, every rank that left or gave up counts.
  static constexpr uint64_t kAnySequence = UINT64_MAX;
  void check_peers(uint64_t sequence, const std::string& what) const;
  // Throws PeerLost if a rank of the node died without closing its communicator.
  void check_alive(int rank, const std::string& what) const;
  // For missing(): shows the others that this rank waits, and notes which of them wait.
  void see_who_waits(uint64_t sequence);
  // Returns "rank 3 (pid 4112, node2)" for the ranks that hold up this collective; writes the name
  // of the first one to `first`.
  std::string missing(uint64_t sequence, int* first) const;
  // Returns the local rank that missing() would name first among the ranks that have not called the
  // collective, or have not looked for long; -1: none. Cheaper: for each look.
  int awaited(uint64_t sequence) const;
  // Returns true if no lower rank of this node waits, according to see_who_waits().
  bool is_first_that_waits() const;
  std::string person(int rank) const;
  // Writes why this rank leaves, before it leaves. Others read this text instead of "closed its
  // communicator"; it is cut if it is too long.
  void explain_leaving(const std::string& words);
  std::string closing(int rank) const;
  // Returns true if its process ended or it closed its communicator: it can take part in nothing
  // more.
  bool has_left(int rank) const;
  // Returns true if no rank of the node has called this before. Call it before giving up.
  bool is_first_to_give_up();
  // Tells the other ranks of the node why this rank takes part in no collective from `first_missed`
  // on. Only the first call counts.
  void fail(const Error& error, uint64_t first_missed);

  // --- after a failure: for node/segments/survivors.hpp ---
  Survival& survival(int rank) const { return control(rank).survival; }
  void wake_all();

 private:
  struct Peer {
    int32_t pid = 0;
    int32_t name = 0;
    std::shared_ptr<const WatchedProcess> process;
    uint32_t looks = 0;        // last value seen
    int64_t looked_at_ns = 0;  // time of its last change, or the start of this rank's wait
  };
  std::byte* base(int rank) const { return memory_.part(rank); }
  Control& control(int rank) const { return *reinterpret_cast<Control*>(base(rank)); }
  CellHeader& cell(int rank, uint64_t sequence) const {
    return *reinterpret_cast<CellHeader*>(base(rank) + layout().cell(sequence));
  }
  CellHeader& result(uint64_t sequence) const {
    return *reinterpret_cast<CellHeader*>(base(0) + layout().result(sequence));
  }
  static Track track_of(std::atomic<uint64_t> Progress::* member) {
    return member == &Progress::staged    ? Track::kStaged
           : member == &Progress::reduced ? Track::kReduced
                                          : Track::kGathered;
  }
  bool count_opened(uint64_t sequence);
  bool all_are_open(uint64_t sequence) const;
  bool count_step(std::atomic<uint64_t> Progress::* member, uint64_t steps);
  bool somebody_sleeps() const;
  void wake(int most);
  void compare_headers(const std::vector<int>& ranks, uint64_t sequence);
  RankGroups make_groups() const;
  std::optional<CombiningTree> make_tree() const;
  std::vector<Doorbell*> bells() const;
  Doorbell& own_bell() const;
  std::vector<Peer> meet_peers(const std::string& path, Listener* listener,
                               const Deadline& deadline);
  int cores_of_node() const;
  // Throws if the rank died, according to the last ProcessWatch::look().
  void fail_if_dead(int rank, const std::string& what) const;
  bool died(int rank) const;
  std::vector<int> who_does_not_wait() const;

  Settings settings_;
  std::string node_name_;
  NodeMemory memory_;
  std::vector<Peer> peers_;
  int cores_;
  WaitPolicy policy_;
  RankGroups groups_;
  std::optional<CombiningTree> tree_;
  uint64_t counted_[kTracks] = {};  // last step that this rank has counted
  std::vector<Doorbell*> bells_;    // of all groups
  Waiter waiter_;
  uint64_t claims_base_;     // parts of earlier collectives
  uint64_t waiting_in_ = 0;  // sequence of the last collective in which this rank waited
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_NODE_GROUP_HPP_
