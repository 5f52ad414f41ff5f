// The chunk pipelines of large collectives: stage, reduce, exchange between nodes, gather, all
// overlapped.
//
// Owns the order of work on one rank and the conditions under which ring slots may be reused. Each
// pipeline is a state machine whose step() never blocks; the caller waits. Memory traffic inside a
// node is (5 - 2/L) bytes per byte of payload for L ranks: a rank stages all but its own slice,
// reduces its slice from the others' slots and its own buffer, and copies the other slices of the
// result.
#ifndef HSGD_COLLECTIVES_PIPELINE_HPP_
#define HSGD_COLLECTIVES_PIPELINE_HPP_

#include <cstdint>
#include <vector>

#include "collectives/trace.hpp"
#include "internode/wire.hpp"
#include "node/node_group.hpp"
#include "os/wait.hpp"

namespace hsgd {

// How `count` elements are cut into steps of equal size, the same on all ranks.
struct Chunking {
  Chunking(uint64_t count, size_t element_bytes, size_t chunk_bytes);
  Range chunk(uint64_t step) const;
  uint64_t elements = 0;  // per step, but the last
  uint64_t steps = 0;
  uint64_t count = 0;
};

// Whether data may move: all headers of the collective agree. Shared by the pipelines; the caller
// decides how.
enum class Permission { kUnknown, kGranted };

// What a pipeline needs to know of the communicator.
struct PipelineContext {
  LocalGroup& local;
  uint64_t base;  // steps of earlier collectives
  size_t slots;
  int leaders;      // 0 on one node
  Store store;      // into shared memory
  Store out_store;  // into the user's output
  uint64_t* intra_bytes;
  hsgd_record* record;  // where times are told; nullptr: nobody asks
};

// A state machine on one rank; the caller waits between the steps.
class Pipeline {
 public:
  virtual ~Pipeline() = default;
  // Stages the first chunk. True when it is staged; the caller then opens the collective.
  virtual bool stage_first() = 0;
  virtual Step step(Permission permission) = 0;
};

class AllreducePipeline final : public Pipeline {
 public:
  // `wire`: this rank's part of the exchange between nodes; nullptr on one node and on ranks that
  // are no leaders.
  AllreducePipeline(const PipelineContext& context, const void* in, void* out,
                    const Chunking& chunking, const Reduction& reduction, SliceExchange* wire);
  // The inputs of all ranks of the node, by local rank: nothing is staged.
  void read_in_place(const std::vector<const std::byte*>& inputs) { shared_ = &inputs; }
  bool stage_first() override;
  Step step(Permission permission) override;

 private:
  bool try_stage();
  bool try_reduce();
  bool try_exchange();
  bool try_gather();
  Range slice(const Range& chunk, int rank) const;
  Range leader_slice(const Range& chunk, int leader) const;
  std::byte* reduced_slice(int rank, uint64_t step, const Range& chunk, const Range& slice) const;
  void gather_from_peers(uint64_t step, const Range& chunk);

  PipelineContext context_;
  const std::byte* in_;
  std::byte* out_;
  Chunking chunking_;
  Reduction reduction_;
  SliceExchange* wire_;
  const std::vector<const std::byte*>* shared_ = nullptr;
  int rank_;
  int size_;
  uint64_t staged_ = 0;
  uint64_t reduced_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t gathered_ = 0;
  std::vector<const void*> inputs_;
};

class BroadcastPipeline final : public Pipeline {
 public:
  // `root`: local rank of the root, or -1 when it is on another node. `wire`: only on local rank 0
  // of each of several nodes.
  BroadcastPipeline(const PipelineContext& context, void* data, const Chunking& chunking,
                    size_t element_bytes, CopyFn copy, int root, TreeBroadcast* wire);
  bool stage_first() override;
  Step step(Permission permission) override;

 private:
  bool try_stage();
  bool try_exchange();
  bool try_gather();
  std::byte* slot(uint64_t step) const;

  PipelineContext context_;
  std::byte* data_;
  Chunking chunking_;
  size_t element_bytes_;
  CopyFn copy_;
  int root_;
  TreeBroadcast* wire_;
  int rank_;
  int size_;
  uint64_t staged_ = 0;
  uint64_t exchanged_ = 0;
  uint64_t gathered_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_PIPELINE_HPP_
