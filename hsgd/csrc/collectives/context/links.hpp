// Links: holds a leader's transport and the exchanges over it.
//
// Also knows which nodes have left. On other ranks it has no transport. Nothing but quiesce()
// blocks.
#ifndef HSGD_COLLECTIVES_CONTEXT_LINKS_HPP_
#define HSGD_COLLECTIVES_CONTEXT_LINKS_HPP_

#include <cstdint>
#include <memory>
#include <optional>

#include "collectives/context/step_sizes.hpp"
#include "network/rounds/header_exchange.hpp"
#include "network/rounds/round_schedule.hpp"
#include "network/rounds/slice_allgather.hpp"
#include "network/rounds/slice_allreduce.hpp"
#include "network/rounds/slice_broadcast.hpp"
#include "network/rounds/tree_broadcast.hpp"
#include "network/transport/messages.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// Returns the room behind a header: for a small payload, or for a leader's slice of a step.
HeaderExchange::Room header_room(const RoundSchedule& rounds, const StepSizes& sizes);

class Links {
 public:
  // `transport` is set on leaders of several nodes, else nullptr.
  Links(std::unique_ptr<Transport> transport, const Place& place, const RoundSchedule& rounds,
        const StepSizes& sizes, const hsgd_options& options);
  bool leads() const { return transport_ != nullptr; }
  int descriptor() const { return leads() ? transport_->descriptor() : -1; }  // see Transport
  HeaderExchange& headers() { return *headers_; }                             // on the first leader
  SliceAllreduce* slices() { return slices_.get(); }  // nullptr on all other ranks
  SliceAllgather* blocks() { return blocks_.get(); }  // as slices()
  // Returns the broadcast of `form`; nullptr on ranks that do not lead.
  BroadcastSteps* copies(BroadcastForm form);
  StepMessages* messages() { return messages_.get(); }  // as slices()
  const WireCounters& counters() const { return counters_; }

  // Tells the other nodes that this node takes part in no further collective.
  void part(const Parting& parting);
  // Returns a node that takes no part in the collective `sequence`; nullptr if this leader knows of
  // none.
  const Parting* parted(uint64_t sequence);
  // Return the values of the transport; -1 on a rank that does not lead.
  int awaited_node() const { return leads() ? transport_->awaited_node() : -1; }
  int leader_of(int node) const { return leads() ? transport_->leader_of(node) : -1; }
  // Ends all exchanges, and waits for sends up to the deadline. Returns false if some sends are
  // still in progress: then this object must stay alive, because they use its buffers.
  bool quiesce(const Deadline& deadline);

 private:
  std::unique_ptr<Transport> transport_;
  WireCounters counters_;
  std::unique_ptr<HeaderExchange> headers_;
  std::unique_ptr<SliceAllreduce> slices_;
  std::unique_ptr<SliceAllgather> blocks_;
  std::unique_ptr<SliceBroadcast> copies_;
  std::unique_ptr<TreeBroadcast> trees_;
  std::unique_ptr<StepMessages> messages_;
  std::optional<Parting> parting_;  // of all nodes that left, the one that misses most
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_LINKS_HPP_
