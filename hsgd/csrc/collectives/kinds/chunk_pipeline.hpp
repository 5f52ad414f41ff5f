// ChunkPipeline: runs all large collectives chunk by chunk: stage, reduce, exchange between nodes,
// gather, all overlapped.
//
// Owns the order of work on one rank and the conditions for the reuse of ring slots. Each
// collective defines its stages and what they do with the bytes of a step. A state machine: step()
// never blocks, the caller waits.
#ifndef HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_
#define HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_

#include <atomic>
#include <cstdint>
#include <optional>

#include "collectives/context/context.hpp"

namespace hsgd {

// The division of `count` elements into steps of equal size; the same on all ranks.
struct Chunking {
  Chunking(uint64_t count, size_t element_bytes, size_t chunk_bytes);
  Range chunk(uint64_t step) const;
  uint64_t elements = 0;  // per step, except the last
  uint64_t steps = 0;
  uint64_t count = 0;
};

// The work of this rank in each step.
struct Stages {
  uint64_t steps = 0;
  int leaders = 0;  // local ranks that carry a step between nodes; 0: on one node
  // kCopies: copies from private memory into this rank's in ring. kNothing: this rank stages
  // nothing. kInReach: the node's inputs are read directly.
  enum class Staging { kCopies, kNothing, kInReach } staging = Staging::kCopies;
  bool reduces = false;                // from the in rings of all
  bool gathers = true;                 // into the output
  bool rides = true;                   // the first leader's first step travels with the headers
  StepWindow* window = nullptr;        // on ranks that carry it between nodes
  Store store = Store::kOrdinary;      // into shared memory
  Store out_store = Store::kOrdinary;  // into the user's output
  // Returns true if sums overwrite inputs in the ring, from which others gather them: if no leader
  // sends them.
  bool sums_in_ring() const { return reduces && gathers && leaders == 0; }
};

class ChunkPipeline {
 public:
  virtual ~ChunkPipeline() = default;
  // Opens the collective, unless it is open, and runs it to its end.
  void run(const Operation& operation);
  // Runs the same on this node only.
  void run_on_node(const Operation& operation);

 protected:
  ChunkPipeline(Context& context, const Stages& stages) : context_(context), stages_(stages) {}

  // operations of the collective on a step
  virtual void stage(uint64_t, std::byte*, Permission) {}
  virtual void reduce(uint64_t) {}
  virtual void begin_exchange(uint64_t) {}
  virtual void end_exchange(uint64_t) {}
  virtual void gather(uint64_t) {}
  // conditions of these operations
  virtual bool may_stage(uint64_t step) const;
  virtual bool may_exchange(uint64_t step) const;
  virtual bool may_gather(uint64_t step) const;

  LocalGroup& local() const { return context_.local(); }
  std::byte* in_slot(int rank, uint64_t step) const {
    return local().in_slot(rank, context_.base() + step);
  }
  std::byte* out_slot(int rank, uint64_t step) const {
    return local().out_slot(rank, context_.base() + step);
  }
  // Return true if all other ranks of the node have finished `step` of this collective, or the step
  // that held its slot before.
  bool peers_reached(std::atomic<uint64_t> Progress::* member, uint64_t step) const {
    return local().peers_reached(member, context_.base() + step + 1);
  }
  bool peers_freed(std::atomic<uint64_t> Progress::* member, uint64_t step) const {
    return local().peers_freed(member, context_.base() + step, context_.slots());
  }
  bool rank_reached(int rank, std::atomic<uint64_t> Progress::* member, uint64_t step) const {
    return local().rank_reached(rank, member, context_.base() + step + 1);
  }
  bool rank_freed(int rank, std::atomic<uint64_t> Progress::* member, uint64_t step) const {
    return local().rank_freed(rank, member, context_.base() + step, context_.slots());
  }
  void publish(std::atomic<uint64_t> Progress::* member, uint64_t steps,
               LocalGroup::Audience audience = LocalGroup::Audience::kAll) {
    local().publish(member, context_.base() + steps, audience);
  }
  // Returns true if all leaders, also those with no part in this collective, have sent the earlier
  // collective's data in the slot of `step`.
  bool earlier_is_sent(uint64_t step) const;
  bool earlier_is_gathered(uint64_t step) const;  // by the other ranks
  // Returns the number of this communicator's steps after which the slot of `step` is free.
  uint64_t held_before(uint64_t step) const;
  // leader(): returns the local rank that carries share `lane` of a step. lane(): the share of this
  // rank.
  int leader(int lane) const { return context_.place().leader_ranks[static_cast<size_t>(lane)]; }
  int lane() const { return context_.place().lane; }
  // Returns true if the shares of all leaders have arrived.
  bool leaders_reached(uint64_t step) const;
  uint64_t staged() const { return staged_; }
  uint64_t exchanged() const { return exchanged_; }
  uint64_t gathered() const { return gathered_; }

  Context& context_;
  const Stages stages_;

 private:
  Step step(Permission permission);
  bool stage_first();
  std::optional<RoundPayload*> first_step();
  void open(const Operation& operation);
  bool try_stage(Permission permission);
  bool try_reduce();
  bool try_exchange();
  bool try_gather();
  bool is_done() const;
  // Returns true on the root of a broadcast; the others wait for this rank alone.
  bool is_root() const { return !stages_.reduces && !stages_.gathers; }

  uint64_t staged_ = 0;
  uint64_t reduced_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t gathered_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_
