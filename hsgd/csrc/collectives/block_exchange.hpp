// What allgather and alltoall have in common: in each step a rank stages what others need of its
// input in its in ring; leaders send that to the nodes that need it, where it lands in the node's
// only out ring; and each rank copies what it needs from its peers' in rings and from the out ring.
//
// Owns the order of messages. Each byte crosses a link once per node that needs it, and inside a
// node costs 4 accesses (2 in, 2 out).
#ifndef HSGD_COLLECTIVES_BLOCK_EXCHANGE_HPP_
#define HSGD_COLLECTIVES_BLOCK_EXCHANGE_HPP_

#include "collectives/chunk_pipeline.hpp"

namespace hsgd {

class BlockExchange : public ChunkPipeline {
 protected:
  BlockExchange(Context& context, const Stages& stages);
  // Posts the sends of what the rank at `place`, on this node, has staged in `slot` for others.
  virtual void send(uint64_t step, int place, const std::byte* slot) = 0;
  // Posts the receive of what the rank at `place`, on another node, sends in a step.
  virtual void receive(uint64_t step, int place) = 0;
  // How much of that has arrived, when the step is complete.
  virtual uint64_t received_bytes(uint64_t step, int place) = 0;

  std::byte* landing(uint64_t step) const { return out_slot(0, step); }  // from other nodes

  const NodeMap& map_;
  StepMessages* messages_;  // on leaders of several nodes

 private:
  void begin_exchange(uint64_t step) final;
  void end_exchange(uint64_t step) final;
  // Whether this leader sends, or receives, what the rank at `place` sends to other nodes.
  bool carries(int place) const {
    return (place - map_.first(map_.node_at(place))) % stages_.leaders == local().rank();
  }
};

// All stages of such a collective.
Stages stages_of_exchange(Context& context, const Operation& operation, uint64_t steps);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_BLOCK_EXCHANGE_HPP_
