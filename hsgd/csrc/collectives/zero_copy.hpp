// Collectives on buffers that all ranks of a node can reach: no staging.
//
// Owns the state machines, and the allreduce. Its traffic is the least there is, each input read
// once and each output written once: 2 S bytes per rank. Never blocks; the caller waits until all
// ranks have entered, and the last step waits for the peers, because they touch this rank's buffers
// until then.
#ifndef HSGD_COLLECTIVES_ZERO_COPY_HPP_
#define HSGD_COLLECTIVES_ZERO_COPY_HPP_

#include <functional>
#include <memory>
#include <vector>

#include "collectives/pipeline.hpp"
#include "kernels/reduce.hpp"
#include "node/node_group.hpp"
#include "node/symmetric_memory.hpp"

namespace hsgd {

// The arguments of all ranks of the node, by local rank, and what keeps them mapped.
struct SharedArguments {
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;  // empty where only inputs need to be in reach
  std::shared_ptr<SharedBuffer> in_buffer;
  std::shared_ptr<SharedBuffer> out_buffer;
};

// What this rank does by itself, and then the wait for all others to have done the same. Takes one
// step of the pipeline's counters.
class DirectWork {
 public:
  using Work = std::function<void()>;
  DirectWork(const PipelineContext& context, Work work)
      : context_(context), work_(std::move(work)) {}
  Step step();

 private:
  PipelineContext context_;
  Work work_;  // empty once it is done
};

class DirectAllreduce {
 public:
  // Takes one step of the pipeline's counters. `claims`: ranks outnumber cores, so that parts are
  // done by whoever runs; otherwise each rank does its own slice.
  DirectAllreduce(const PipelineContext& context, const SharedArguments& arguments, uint64_t count,
                  const Reduction& reduction, bool claims);
  DirectAllreduce(const DirectAllreduce&) = delete;
  Step step();

 private:
  Step claim_parts();
  void reduce(const Range& part);
  void reduce_block(const Range& block);

  PipelineContext context_;
  const SharedArguments& arguments_;
  uint64_t count_;
  Reduction reduction_;
  bool claims_;
  DirectWork own_slice_;
  std::vector<const void*> inputs_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_ZERO_COPY_HPP_
