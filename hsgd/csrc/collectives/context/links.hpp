// What a leader has of the network between nodes.
//
// Owns the transport, what collectives send over it, and which nodes have parted. Ranks that are no
// leaders have one without a transport. Nothing but quiesce() blocks.
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

// What may lie behind a header: a small payload, or a leader's slice of a step.
HeaderExchange::Room header_room(const RoundSchedule& rounds, const StepSizes& sizes);

class Links {
 public:
  // `transport`: on leaders of several nodes, else nullptr.
  Links(std::unique_ptr<Transport> transport, const Place& place, const RoundSchedule& rounds,
        const StepSizes& sizes, const hsgd_options& options);
  bool leads() const { return transport_ != nullptr; }
  int descriptor() const { return leads() ? transport_->descriptor() : -1; }  // see Transport
  HeaderExchange& headers() { return *headers_; }                             // on the first leader
  SliceAllreduce* slices() { return slices_.get(); }  // nullptr but on leaders
  SliceAllgather* blocks() { return blocks_.get(); }  // as slices()
  // As slices(), for a payload of one step or of many.
  BroadcastSteps* copies(BroadcastForm form);
  StepMessages* messages() { return messages_.get(); }  // as slices()
  const WireCounters& counters() const { return counters_; }

  // Tells the other nodes that this one takes part no more.
  void part(const Parting& parting);
  // A node that takes no part in the collective `sequence`; nullptr while this leader knows of
  // none.
  const Parting* parted(uint64_t sequence);
  // As those of the transport; of a rank that does not lead no node is awaited.
  int awaited_node() const { return leads() ? transport_->awaited_node() : -1; }
  int leader_of(int node) const { return leads() ? transport_->leader_of(node) : -1; }
  // Ends what is under way, and waits for sends up to the deadline. False when some are still under
  // way: then this object must stay, because they use its buffers.
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
  std::optional<Parting> parting_;  // of the nodes that parted, the one that misses most
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_LINKS_HPP_
