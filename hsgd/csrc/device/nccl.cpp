// NcclGroup: finds NCCL's functions by name and runs its operations on blocks of any size.
#include "device/nccl.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/os/signal_mask.hpp"
#include "core/os/wait.hpp"

namespace hsgd {
namespace {

// Values of NCCL's header.
constexpr NcclResult kSuccess = 0;
constexpr int kDtypes[HSGD_DTYPE_COUNT] = {7, 8, 6, 9, 0, 2, 4, 1};  // by hsgd_dtype
constexpr int kOps[HSGD_OP_COUNT] = {0, 4, 3, 2, 1};                 // by hsgd_op

const void* at(DeviceAddress address) { return reinterpret_cast<const void*>(address); }
void* to(DeviceAddress address) { return reinterpret_cast<void*>(address); }

bool are_equal(const std::vector<uint64_t>& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](uint64_t count) { return count == counts.front(); });
}

// The result of a thread that creates a communicator; the thread keeps it if no caller waits any
// more.
struct Made {
  std::promise<NcclResult> result;
  NcclComm comm = nullptr;
};

}  // namespace

NcclLibrary::NcclLibrary(const std::string& name) : name_(name) {
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw_error(HSGD_ERR_SYSTEM, -1, "no NCCL: %s", ::dlerror());
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, symbol));
    if (function != nullptr) return;
    throw_error(HSGD_ERR_SYSTEM, -1, "%s has no %s: it is older than NCCL 2.10", name_.c_str(),
                symbol);
  };
  find(functions_.ncclGetVersion, "ncclGetVersion");
  find(functions_.ncclGetUniqueId, "ncclGetUniqueId");
  find(functions_.ncclCommInitRank, "ncclCommInitRank");
  find(functions_.ncclCommDestroy, "ncclCommDestroy");
  find(functions_.ncclCommAbort, "ncclCommAbort");
  find(functions_.ncclAllReduce, "ncclAllReduce");
  find(functions_.ncclReduceScatter, "ncclReduceScatter");
  find(functions_.ncclAllGather, "ncclAllGather");
  find(functions_.ncclBroadcast, "ncclBroadcast");
  find(functions_.ncclReduce, "ncclReduce");
  find(functions_.ncclSend, "ncclSend");
  find(functions_.ncclRecv, "ncclRecv");
  find(functions_.ncclGroupStart, "ncclGroupStart");
  find(functions_.ncclGroupEnd, "ncclGroupEnd");
  find(functions_.ncclGetErrorString, "ncclGetErrorString");
}

void NcclLibrary::check(NcclResult code, const char* what) const {
  if (code == kSuccess) return;
  throw_error(HSGD_ERR_SYSTEM, -1,
              "NCCL: %s failed: error %d (%s); set NCCL_DEBUG=WARN for details", what, code,
              functions_.ncclGetErrorString(code));
}

NcclId NcclLibrary::new_id() const {
  NcclId id;
  check(functions_.ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}

int NcclLibrary::version() const {
  int version = 0;
  check(functions_.ncclGetVersion(&version), "ncclGetVersion");
  return version;
}

NcclGroup::NcclGroup(std::shared_ptr<const NcclLibrary> library,
                     std::shared_ptr<const Device> device, const NcclId& id, int rank, int size,
                     const Look& look)
    : library_(std::move(library)),
      nccl_(library_->functions()),
      device_(std::move(device)),
      rank_(rank),
      size_(size) {
  // Creation has no deadline, so it runs in its own thread, which stays behind if a rank does not
  // come.
  const auto made = std::make_shared<Made>();
  std::future<NcclResult> result = made->result.get_future();
  {
    const SignalsBlocked blocked;
    std::thread([made, id, rank, size, device = device_, library = library_] {
      try {
        const Device::Current current(*device);
        NcclComm comm = nullptr;
        const NcclResult code = library->functions().ncclCommInitRank(&comm, size, id, rank);
        made->comm = comm;
        made->result.set_value(code);
      } catch (const std::exception&) {
        made->result.set_exception(std::current_exception());
      }
    }).detach();
  }
  while (result.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) look();
  library_->check(result.get(), "ncclCommInitRank");
  comm_ = made->comm;
}

NcclGroup::~NcclGroup() {
  end(false);
  static_cast<void>(has_ended());
}

bool NcclGroup::has_ended() const {
  constexpr auto kPatience = std::chrono::seconds(10);
  return !ended_.valid() || ended_.wait_for(kPatience) == std::future_status::ready;
}

void NcclGroup::abort() noexcept { end(true); }

// Ends the communicator in its own thread: NCCL may wait for the device, and for other ranks.
void NcclGroup::end(bool by_abort) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_.valid() || comm_ == nullptr) return;
  is_aborted_.store(true);
  const auto ended = std::make_shared<std::promise<void>>();
  ended_ = ended->get_future();
  const auto work = [ended, by_abort, comm = comm_, inside = inside_, library = library_,
                     device = device_] {
    // A thread in a call may wait for a full queue of kernels; this wait has a limit.
    const Deadline patience(1.0);
    while (inside->load() > 0 && !patience.passed()) pause_ms(1);
    try {
      const Device::Current current(*device);
      const NcclFunctions& nccl = library->functions();
      static_cast<void>(by_abort ? nccl.ncclCommAbort(comm) : nccl.ncclCommDestroy(comm));
    } catch (const Error&) {  // no context any more: nothing left to release
    }
    ended->set_value();
  };
  const SignalsBlocked blocked;
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {  // no thread available: run it here
    work();
  }
}

NcclGroup::Inside::Inside(NcclGroup& group) : inside_(*group.inside_) {
  inside_.fetch_add(1);
  if (!group.is_aborted_.load()) return;
  inside_.fetch_sub(1);
  throw_error(HSGD_ERR_CLOSED, -1, "NCCL was aborted after an error");
}

NcclGroup::Inside::~Inside() { inside_.fetch_sub(1); }

template <class Body>
void NcclGroup::as_group(Body&& body) {
  library_->check(nccl_.ncclGroupStart(), "ncclGroupStart");
  try {
    body();
  } catch (...) {
    static_cast<void>(nccl_.ncclGroupEnd());
    throw;
  }
  library_->check(nccl_.ncclGroupEnd(), "ncclGroupEnd");
}

void NcclGroup::allreduce(DeviceAddress in, DeviceAddress out, uint64_t count, hsgd_dtype dtype,
                          hsgd_op op, CudaStream stream) {
  const Inside inside(*this);
  library_->check(
      nccl_.ncclAllReduce(at(in), to(out), count, kDtypes[dtype], kOps[op], comm_, stream),
      "ncclAllReduce");
}

void NcclGroup::broadcast(DeviceAddress data, uint64_t count, hsgd_dtype dtype, int root,
                          CudaStream stream) {
  const Inside inside(*this);
  library_->check(
      nccl_.ncclBroadcast(at(data), to(data), count, kDtypes[dtype], root, comm_, stream),
      "ncclBroadcast");
}

void NcclGroup::reduce_scatter(DeviceAddress in, DeviceAddress out,
                               const std::vector<uint64_t>& counts, hsgd_dtype dtype, hsgd_op op,
                               CudaStream stream) {
  const Inside inside(*this);
  if (are_equal(counts)) {
    library_->check(nccl_.ncclReduceScatter(at(in), to(out), counts.front(), kDtypes[dtype],
                                            kOps[op], comm_, stream),
                    "ncclReduceScatter");
    return;
  }
  as_group([&] {
    for (int root = 0; root < size_; ++root) {
      const uint64_t count = counts[static_cast<size_t>(root)];
      library_->check(nccl_.ncclReduce(at(in), to(root == rank_ ? out : in), count, kDtypes[dtype],
                                       kOps[op], root, comm_, stream),
                      "ncclReduce");
      in += count * hsgd_dtype_bytes(dtype);
    }
  });
}

void NcclGroup::allgather(DeviceAddress in, DeviceAddress out, const std::vector<uint64_t>& counts,
                          hsgd_dtype dtype, CudaStream stream) {
  const Inside inside(*this);
  if (are_equal(counts)) {
    library_->check(
        nccl_.ncclAllGather(at(in), to(out), counts.front(), kDtypes[dtype], comm_, stream),
        "ncclAllGather");
    return;
  }
  as_group([&] {
    for (int root = 0; root < size_; ++root) {
      const uint64_t count = counts[static_cast<size_t>(root)];
      library_->check(nccl_.ncclBroadcast(at(root == rank_ ? in : out), to(out), count,
                                          kDtypes[dtype], root, comm_, stream),
                      "ncclBroadcast");
      out += count * hsgd_dtype_bytes(dtype);
    }
  });
}

void NcclGroup::alltoall(DeviceAddress in, const std::vector<uint64_t>& counts, DeviceAddress out,
                         const std::vector<uint64_t>& receive_counts, hsgd_dtype dtype,
                         CudaStream stream) {
  const Inside inside(*this);
  const size_t item = hsgd_dtype_bytes(dtype);
  as_group([&] {
    for (int peer = 0; peer < size_; ++peer) {
      const uint64_t sent = counts[static_cast<size_t>(peer)];
      const uint64_t received = receive_counts[static_cast<size_t>(peer)];
      if (sent > 0) {
        library_->check(nccl_.ncclSend(at(in), sent, kDtypes[dtype], peer, comm_, stream),
                        "ncclSend");
      }
      if (received > 0) {
        library_->check(nccl_.ncclRecv(to(out), received, kDtypes[dtype], peer, comm_, stream),
                        "ncclRecv");
      }
      in += sent * item;
      out += received * item;
    }
  });
}

}  // namespace hsgd
