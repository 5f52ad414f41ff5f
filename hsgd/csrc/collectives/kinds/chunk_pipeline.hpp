// The one pipeline of large collectives: stage, reduce, exchange between nodes, gather, chunk by
// chunk, all overlapped.
//
// Owns the order of work on one rank and the conditions under which ring slots may be reused. Which
// stages there are, and what each does with the bytes of a step, is the collective's own. A state
// machine whose step() never blocks; the caller waits.
#ifndef HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_
#define HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_

#include <atomic>
#include <cstdint>
#include <optional>

#include "collectives/context/context.hpp"

namespace hsgd {

// How `count` elements are cut into steps of equal size, the same on all ranks.
struct Chunking {
  Chunking(uint64_t count, size_t element_bytes, size_t chunk_bytes);
  Range chunk(uint64_t step) const;
  uint64_t elements = 0;  // per step, but the last
  uint64_t steps = 0;
  uint64_t count = 0;
};

// What this rank has to do in each step.
struct Stages {
  uint64_t steps = 0;
  int leaders = 0;  // local ranks that carry it between nodes; 0: on one node
  // kCopies: from private memory into the in ring of this rank. kNothing: it has nothing to stage.
  // kInReach: the inputs of all ranks of the node are read where they lie.
  enum class Staging { kCopies, kNothing, kInReach } staging = Staging::kCopies;
  bool reduces = false;                // from the in rings of all
  bool gathers = true;                 // into the output
  bool rides = true;                   // the first leader's first step travels with the headers
  StepWindow* window = nullptr;        // on ranks that carry it between nodes
  Store store = Store::kOrdinary;      // into shared memory
  Store out_store = Store::kOrdinary;  // into the user's output
  // Whether sums take the place of inputs, where others gather them: where no leader sends them.
  bool sums_in_ring() const { return reduces && gathers && leaders == 0; }
};

class ChunkPipeline {
 public:
  virtual ~ChunkPipeline() = default;
  // Opens the collective, unless it is open, and runs it to its end.
  void run(const Operation& operation);
  // The same without the other nodes.
  void run_on_node(const Operation& operation);

 protected:
  ChunkPipeline(Context& context, const Stages& stages) : context_(context), stages_(stages) {}

  // --- what the collective does with a step ---
  // May touch the output only when the permission is granted. Between nodes nothing but gather()
  // touches it.
  virtual void stage(uint64_t, std::byte*, Permission) {}
  virtual void reduce(uint64_t) {}
  virtual void begin_exchange(uint64_t) {}
  virtual void end_exchange(uint64_t) {}
  virtual void gather(uint64_t) {}
  // --- and when it may ---
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
  // Whether all other ranks of the node have finished `step` of this collective, or the step whose
  // slot it takes.
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
  // Whether leaders have sent what the slot of `step` held in an earlier collective, also those
  // that have no part in this one.
  bool earlier_is_sent(uint64_t step) const;
  bool earlier_is_gathered(uint64_t step) const;  // of an earlier collective, by the other ranks
  // The steps of this communicator after which the slot of `step` is free.
  uint64_t held_before(uint64_t step) const;
  // The local rank that carries the share `lane` of a step, and which of them this rank carries.
  int leader(int lane) const { return context_.place().leader_ranks[static_cast<size_t>(lane)]; }
  int lane() const { return context_.place().lane; }
  // Whether the shares of all leaders are here.
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
  // Broadcasts: the others wait for this rank alone.
  bool is_root() const { return !stages_.reduces && !stages_.gathers; }

  uint64_t staged_ = 0;
  uint64_t reduced_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t gathered_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_CHUNK_PIPELINE_HPP_
