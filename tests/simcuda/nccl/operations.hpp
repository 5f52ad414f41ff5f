// Operations of NCCL as messages between ranks.
//
// Owns which rank sends what to whom. All operations of a group are under way at once.
#ifndef SIMCUDA_NCCL_OPERATIONS_HPP_
#define SIMCUDA_NCCL_OPERATIONS_HPP_

#include <memory>
#include <vector>

#include "communicator.hpp"

namespace simnccl {

enum class Function : uint32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kSend,
  kReceive
};

struct Operation {
  Function function;
  const void* send;
  void* receive;
  size_t count;  // of elements, as in the call
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;  // or root

  size_t bytes() const;
  size_t bytes_sent(const Communicator& comm) const;  // of its send buffer
};

// Puts operations on a stream as one.
ncclResult_t launch(const std::shared_ptr<Communicator>& comm, cudaStream_t stream,
                    std::vector<Operation> operations);

// Since the last reset; live_comms is left alone.
void add_counts(simnccl_counters* counters);
void reset_counts();

}  // namespace simnccl

#endif  // SIMCUDA_NCCL_OPERATIONS_HPP_
