// Planning the messages of operations, and running them on a stream.
//
// Every rank sends to every other directly. Reductions receive a copy of each rank's part and
// combine them when all are there, so that a buffer may be both source and target.
#include "operations.hpp"

#include <deque>
#include <utility>

#include "reduction.hpp"

namespace simnccl {
namespace {

constexpr const char kKernel[] = "simnccl kernel";

// Written by calls and streams of any thread; sums only.
std::atomic<uint64_t> bytes_sent{0};
std::atomic<uint64_t> calls{0};
std::atomic<uint64_t> aborted{0};

// The operations of one launch: messages, and what is combined after them.
class Plan {
 public:
  Plan(simcuda::Context& context, const Communicator& comm)
      : context_(context), comm_(comm), transfers_(comm.region(), comm.rank(), comm.size()) {}

  CUresult add(const Operation& operation);
  // False: stopped.
  bool run();
  const std::string& mismatch() const { return transfers_.mismatch(); }

 private:
  struct Reduction {
    Operation operation;
    std::byte* target;
    std::vector<std::vector<std::byte>> parts;
  };
  CUresult view(const void* address, size_t bytes, std::byte** data);
  void send(const Operation& operation, int peer, const std::byte* data);
  void receive(const Operation& operation, int peer, std::byte* data);
  void receive_parts(const Operation& operation, std::byte* target);
  void add_messages(const Operation& operation, const std::byte* source, std::byte* target);

  simcuda::Context& context_;
  const Communicator& comm_;
  Transfers transfers_;
  std::vector<simcuda::View> held_;
  std::deque<Reduction> reductions_;  // never move: messages point into them
};

// How many buffers of operation.bytes() the arguments are, for this rank.
size_t source_blocks(const Operation& operation, const Communicator& comm) {
  const auto size = static_cast<size_t>(comm.size());
  switch (operation.function) {
    case Function::kReceive:
      return 0;
    case Function::kReduceScatter:
      return size;
    case Function::kBroadcast:
      return comm.rank() == operation.peer ? 1 : 0;
    default:
      return 1;
  }
}

size_t target_blocks(const Operation& operation, const Communicator& comm) {
  const auto size = static_cast<size_t>(comm.size());
  switch (operation.function) {
    case Function::kSend:
      return 0;
    case Function::kAllGather:
      return size;
    case Function::kReduce:
      return comm.rank() == operation.peer ? 1 : 0;
    default:
      return 1;
  }
}

CUresult Plan::view(const void* address, size_t bytes, std::byte** data) {
  if (bytes == 0) return CUDA_SUCCESS;
  simcuda::View found;
  const CUresult result = simcuda::translate(kKernel, context_, address, bytes, &found);
  *data = found.data;
  held_.push_back(std::move(found));
  return result;
}

CUresult Plan::add(const Operation& operation) {
  const size_t bytes = operation.bytes();
  std::byte* source = nullptr;
  std::byte* target = nullptr;
  CUresult result = view(operation.send, bytes * source_blocks(operation, comm_), &source);
  if (result == CUDA_SUCCESS)
    result = view(operation.receive, bytes * target_blocks(operation, comm_), &target);
  if (result == CUDA_SUCCESS) add_messages(operation, source, target);
  return result;
}

// A send and its receive are of one function to the peers.
Header header_of(const Operation& operation) {
  const bool receives = operation.function == Function::kReceive;
  const Function function = receives ? Function::kSend : operation.function;
  return {static_cast<uint32_t>(function), static_cast<uint32_t>(operation.type),
          operation.bytes()};
}

void Plan::send(const Operation& operation, int peer, const std::byte* data) {
  transfers_.send(peer, header_of(operation), data);
}

void Plan::receive(const Operation& operation, int peer, std::byte* data) {
  transfers_.receive(peer, header_of(operation), data);
}

void Plan::receive_parts(const Operation& operation, std::byte* target) {
  const auto size = static_cast<size_t>(comm_.size());
  const std::vector<std::byte> empty(operation.bytes());
  reductions_.push_back({operation, target, {size, empty}});
  for (int peer = 0; peer < comm_.size(); ++peer) {
    receive(operation, peer, reductions_.back().parts[static_cast<size_t>(peer)].data());
  }
}

void Plan::add_messages(const Operation& operation, const std::byte* source, std::byte* target) {
  const size_t bytes = operation.bytes();
  const bool root = comm_.rank() == operation.peer;
  const auto to_all = [&](size_t step) {
    for (int peer = 0; peer < comm_.size(); ++peer) {
      send(operation, peer, source + step * static_cast<size_t>(peer));
    }
  };
  switch (operation.function) {
    case Function::kAllReduce:
      to_all(0);
      return receive_parts(operation, target);
    case Function::kReduceScatter:
      to_all(bytes);
      return receive_parts(operation, target);
    case Function::kAllGather:
      to_all(0);
      for (int peer = 0; peer < comm_.size(); ++peer) {
        receive(operation, peer, target + bytes * static_cast<size_t>(peer));
      }
      return;
    case Function::kBroadcast:
      if (root) to_all(0);
      return receive(operation, operation.peer, target);
    case Function::kReduce:
      send(operation, operation.peer, source);
      if (root) receive_parts(operation, target);
      return;
    case Function::kSend:
      return send(operation, operation.peer, source);
    case Function::kReceive:
      return receive(operation, operation.peer, target);
  }
}

bool Plan::run() {
  if (!transfers_.run([this] { return comm_.stopped(); })) return false;
  if (!reductions_.empty()) simcuda::pause();
  for (const Reduction& each : reductions_) {
    std::vector<const std::byte*> parts;
    for (const auto& part : each.parts) parts.push_back(part.data());
    reduce(parts, each.target, each.operation.count, each.operation.type, each.operation.op);
  }
  return true;
}

// What a launch does on its stream. Aborted operations leave the stream as if they were done.
CUresult run(simcuda::Context& context, Communicator& comm, Turn& turn,
             const std::vector<Operation>& operations) {
  const auto count_aborted = [&] {
    if (comm.aborted()) aborted += operations.size();
  };
  if (!turn.begin()) {
    count_aborted();
    return CUDA_SUCCESS;
  }
  CUresult result = CUDA_SUCCESS;
  {
    Plan plan(context, comm);
    for (const Operation& each : operations) {
      if (result == CUDA_SUCCESS) result = plan.add(each);
    }
    if (result == CUDA_SUCCESS && !plan.run()) count_aborted();
  }
  turn.end();
  if (result != CUDA_SUCCESS) comm.async_error.store(ncclUnhandledCudaError);
  return result;
}

}  // namespace

size_t Operation::bytes() const { return count * type_bytes(type); }

size_t Operation::bytes_sent(const Communicator& comm) const {
  return bytes() * source_blocks(*this, comm);
}

ncclResult_t launch(const std::shared_ptr<Communicator>& comm, cudaStream_t stream,
                    std::vector<Operation> operations) {
  const size_t count = operations.size();
  size_t bytes = 0;
  for (const Operation& each : operations) bytes += each.bytes_sent(*comm);
  // In a holder of its own: std::function wants what can be copied.
  auto turn = std::make_shared<Turn>(comm);
  const simcuda::ScopedContext current(comm->context());
  const CUresult result =
      simcuda::enqueue(kKernel, stream,
                       [comm, turn = std::move(turn), list = std::move(operations)](
                           simcuda::Context& context) { return run(context, *comm, *turn, list); });
  if (result != CUDA_SUCCESS) return ncclUnhandledCudaError;
  calls += count;
  bytes_sent += bytes;
  return ncclSuccess;
}

void add_counts(simnccl_counters* counters) {
  counters->bytes_sent = bytes_sent.load();
  counters->calls = calls.load();
  counters->aborted = aborted.load();
}

void reset_counts() {
  bytes_sent = 0;
  calls = 0;
  aborted = 0;
}

}  // namespace simnccl
