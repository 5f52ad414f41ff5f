// NCCL's functions: checks of arguments, groups, and the life of communicators.
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "communicator.hpp"
#include "meeting.hpp"
#include "operations.hpp"
#include "reduction.hpp"

using namespace simnccl;

namespace {

constexpr int kVersion = 23004;  // unless SIMNCCL_VERSION has another one

// Of a thread, between ncclGroupStart() and ncclGroupEnd().
struct Group {
  struct Launch {
    std::shared_ptr<Communicator> comm;
    cudaStream_t stream;
    std::vector<Operation> operations;
  };
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first of its calls
  std::vector<Launch> launches;      // one for each communicator
};

Group& group() {
  thread_local Group open;
  return open;
}

std::string& last_error() {
  thread_local std::string text;
  return text;
}

ncclResult_t fail(ncclResult_t result, const std::string& text) {
  last_error() = text;
  return result;
}

ncclResult_t injected(const char* function) {
  const auto result = static_cast<ncclResult_t>(simcuda::injected(function));
  return result == ncclSuccess ? result : fail(result, std::string(function) + ": by a test");
}

// For calls that only need a communicator.
ncclResult_t enter(const char* function, ncclComm_t handle, std::shared_ptr<Communicator>* comm) {
  const ncclResult_t result = injected(function);
  if (result != ncclSuccess) return result;
  *comm = communicators().find(handle);
  if (*comm == nullptr) return fail(ncclInvalidArgument, std::string(function) + ": no such comm");
  return ncclSuccess;
}

ncclResult_t check(const Operation& operation, const Communicator& comm) {
  if (type_bytes(operation.type) == 0) return fail(ncclInvalidArgument, "unknown data type");
  if (operation.op < ncclSum || operation.op > ncclAvg)
    return fail(ncclInvalidArgument, "unknown reduction");
  if (operation.peer < 0 || operation.peer >= comm.size())
    return fail(ncclInvalidArgument, "no such rank");
  if (comm.aborted()) return fail(ncclInvalidUsage, "the communicator was aborted");
  return ncclSuccess;
}

// Joins the launch of its communicator in the open group. One with two streams is not simulated.
ncclResult_t add_to_group(const std::shared_ptr<Communicator>& comm, cudaStream_t stream,
                          const Operation& operation) {
  for (Group::Launch& launch : group().launches) {
    if (launch.comm != comm) continue;
    if (launch.stream != stream) return fail(ncclInvalidUsage, "a group with two streams");
    launch.operations.push_back(operation);
    return ncclSuccess;
  }
  group().launches.push_back({comm, stream, {operation}});
  return ncclSuccess;
}

ncclResult_t submit(const char* function, ncclComm_t handle, cudaStream_t stream,
                    const Operation& operation) {
  std::shared_ptr<Communicator> comm;
  const bool grouped = group().depth > 0;
  ncclResult_t result = enter(function, handle, &comm);
  if (result == ncclSuccess) result = check(operation, *comm);
  if (result == ncclSuccess && operation.count > 0) {
    result = grouped ? add_to_group(comm, stream, operation) : launch(comm, stream, {operation});
  }
  if (grouped && group().error == ncclSuccess) group().error = result;
  return result;
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  const char* other = std::getenv("SIMNCCL_VERSION");
  *version = other == nullptr ? kVersion : std::atoi(other);
  return injected(__func__);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const ncclResult_t result = injected(__func__);
  if (result != ncclSuccess) return result;
  if (id == nullptr) return ncclInvalidArgument;
  return open_meeting(id) ? ncclSuccess : fail(ncclSystemError, "no socket to meet at");
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return result < ncclSuccess || result >= ncclNumResults ? "unknown result code" : kTexts[result];
}

const char* ncclGetLastError(ncclComm_t) { return last_error().c_str(); }

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  ncclResult_t result = injected(__func__);
  if (result != ncclSuccess) return result;
  if (comm == nullptr || size < 1 || rank < 0 || rank >= size)
    return fail(ncclInvalidArgument, "ncclCommInitRank: no such rank");
  simcuda::Context* context = simcuda::current_or_first_context();
  if (context == nullptr || context->failed())
    return fail(ncclUnhandledCudaError, "ncclCommInitRank: no device, or one that failed");
  const Meeting meeting = join_meeting(id, rank, size, context->uuid());
  if (meeting.result != ncclSuccess) return fail(meeting.result, meeting.why);
  auto made = std::make_shared<Communicator>(*context, rank, size, meeting.fd);
  if (!made->region().valid()) return fail(ncclSystemError, "no memory to share");
  communicators().add(made);
  *comm = made->handle();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result == ncclSuccess) comm->drain();
  return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result != ncclSuccess) return result;
  comm->drain();
  communicators().remove(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result != ncclSuccess) return result;
  comm->abort();
  communicators().remove(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result != ncclSuccess) return result;
  if (error == nullptr) return ncclInvalidArgument;
  *error = static_cast<ncclResult_t>(comm->async_error.load());
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result == ncclSuccess) *count = comm->size();
  return result;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result == ncclSuccess) *device = comm->context().device();
  return result;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  std::shared_ptr<Communicator> comm;
  const ncclResult_t result = enter(__func__, handle, &comm);
  if (result == ncclSuccess) *rank = comm->rank();
  return result;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(__func__, comm, stream, {Function::kAllReduce, send, receive, count, type, op, 0});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return submit(__func__, comm, stream,
                {Function::kReduceScatter, send, receive, receive_count, type, op, 0});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(__func__, comm, stream,
                {Function::kAllGather, send, receive, send_count, type, ncclSum, 0});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(__func__, comm, stream,
                {Function::kBroadcast, send, receive, count, type, ncclSum, root});
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(__func__, comm, stream, {Function::kReduce, send, receive, count, type, op, root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return submit(__func__, comm, stream,
                {Function::kSend, send, nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(__func__, comm, stream,
                {Function::kReceive, nullptr, receive, count, type, ncclSum, peer});
}

ncclResult_t ncclGroupStart() {
  const ncclResult_t result = injected(__func__);
  if (result == ncclSuccess) ++group().depth;
  return result;
}

// The calls of a group in which one was refused are dropped, all of them.
ncclResult_t ncclGroupEnd() {
  ncclResult_t result = injected(__func__);
  if (group().depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group().depth > 0) return result;
  const Group done = std::exchange(group(), Group{});
  if (result == ncclSuccess) result = done.error;
  for (const Group::Launch& each : done.launches) {
    if (result == ncclSuccess) result = launch(each.comm, each.stream, each.operations);
  }
  return result;
}

void simnccl_get_counters(simnccl_counters* counters) {
  add_counts(counters);
  counters->live_comms = communicators().live();
}

void simnccl_reset_counters() { reset_counts(); }

ncclResult_t simnccl_set_async_error(ncclComm_t handle, int error) {
  const auto comm = communicators().find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  comm->async_error.store(error);
  return ncclSuccess;
}
