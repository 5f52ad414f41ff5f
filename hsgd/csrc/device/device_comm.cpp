// DeviceComm: runs calls in order and handles errors.
#include "device/device_comm.hpp"

#include <numeric>
#include <utility>

#include "core/base/dtypes.hpp"
#include "core/base/error.hpp"
#include "core/base/status.hpp"
#include "device/nccl_path.hpp"

namespace hsgd {

namespace {

uint64_t sum_of(const std::vector<uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

uint64_t input_of(const DeviceCall& call, size_t rank) {
  if (call.counts.empty()) return call.count;
  return call.kind == HSGD_ALLGATHER ? call.counts[rank] : sum_of(call.counts);
}

uint64_t output_of(const DeviceCall& call, size_t rank) {
  if (call.counts.empty()) return call.count;
  if (call.kind == HSGD_ALLGATHER) return sum_of(call.counts);
  return call.kind == HSGD_ALLTOALL ? sum_of(call.receive_counts) : call.counts[rank];
}

// Returns true if input and output are one array, as far as a kind allows that.
bool is_in_place(const DeviceCall& call, size_t rank) {
  if (call.counts.empty()) return call.in == call.out;
  uint64_t before = 0;
  for (size_t other = 0; other < rank; ++other) before += call.counts[other];
  before *= hsgd_dtype_bytes(call.dtype);
  return (call.kind == HSGD_ALLGATHER && call.in == call.out + before) ||
         (call.kind == HSGD_REDUCE_SCATTER && call.out == call.in + before);
}

// Checks arguments now: the exchange thread would find errors only while other ranks wait.
void check_arguments(const DeviceCall& call, int rank) {
  if (call.kind == HSGD_ALLREDUCE || call.kind == HSGD_REDUCE_SCATTER)
    check_type(call.dtype, call.op);
  const auto own = static_cast<size_t>(rank);
  const size_t in = input_of(call, own) * hsgd_dtype_bytes(call.dtype);
  const size_t out = output_of(call, own) * hsgd_dtype_bytes(call.dtype);
  const bool apart = call.in + in <= call.out || call.out + out <= call.in;
  if (in == 0 || out == 0 || apart || is_in_place(call, own)) return;
  throw_invalid("input and output overlap on the device; pass arrays that do not overlap");
}

}  // namespace

DeviceWork::DeviceWork(std::shared_ptr<const Device> device, std::shared_ptr<EventPool> events)
    : device_(std::move(device)), events_(std::move(events)), event_(events_->take()) {}

DeviceWork::~DeviceWork() { events_->give_back(std::move(event_)); }

void DeviceWork::order(CudaStream stream) const {
  const Device::Current current(*device_);
  device_->wait(stream, *event_);
}

bool DeviceWork::done() const {
  const Device::Current current(*device_);
  return device_->is_done(*event_);
}

// The members that need the device's context for construction and destruction.
struct DeviceComm::Parts {
  Parts(const std::shared_ptr<const Device>& device, const std::vector<hsgd_comm*>& comms,
        const DeviceOptions& options)
      : nccl(new_nccl(device, comms, options)),
        path(*device, comms, options.chunk_bytes, options.slots, nccl.get()) {}

  static std::unique_ptr<NcclPath> new_nccl(const std::shared_ptr<const Device>& device,
                                            const std::vector<hsgd_comm*>& comms,
                                            const DeviceOptions& options) {
    if (options.nccl_library.empty()) return nullptr;
    NcclPath::Settings settings;
    settings.library = std::make_shared<const NcclLibrary>(options.nccl_library);
    settings.id = options.nccl_id;
    settings.comm = comms.front();
    settings.between = comms.size() > 1 ? comms[1] : nullptr;
    settings.slice_bytes = options.chunk_bytes;
    settings.slots = options.slots;
    return std::make_unique<NcclPath>(device, settings);
  }

  std::unique_ptr<NcclPath> nccl;  // watched by the path's thread, which ends before
  HostPath path;
};

DeviceComm::DeviceComm(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd_comm> between,
                       const DeviceOptions& options)
    : comm_(std::move(comm)),
      between_(std::move(between)),
      device_(std::make_shared<const Device>(options.cuda_library, options.ordinal)),
      events_(std::make_shared<EventPool>(*device_)) {
  hsgd_comm_topology(comm_.get(), &topology_);
  if (topology_.size == 1) return;  // a single rank only copies
  std::vector<hsgd_comm*> comms = {comm_.get()};
  if (between_ != nullptr) comms.push_back(between_.get());
  const Device::Current current(*device_);
  parts_ = std::make_unique<Parts>(device_, comms, options);
}

DeviceComm::~DeviceComm() {
  if (!owner_.is_this_process()) {  // the thread and the device do not exist here
    static_cast<void>(parts_.release());
    static_cast<void>(input_.release());
    static_cast<void>(new std::shared_ptr<EventPool>(events_));
    static_cast<void>(new std::shared_ptr<const Device>(device_));
    return;
  }
  static_cast<void>(finish());
}

bool DeviceComm::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_finished_ || !owner_.is_this_process()) return true;
  is_finished_ = true;
  bool is_done = true;
  try {
    const Device::Current current(*device_);
    if (parts_ != nullptr) is_done = parts_->path.finish();
    const std::lock_guard<std::mutex> parts_lock(parts_mutex_);
    parts_.reset();
    input_.reset();
  } catch (const Error&) {  // no context any more: nothing left to release
    static_cast<void>(parts_.release());
    static_cast<void>(input_.release());
    static_cast<void>(new std::shared_ptr<hsgd_comm>(comm_));
    static_cast<void>(new std::shared_ptr<hsgd_comm>(between_));
  }
  return is_done;
}

void DeviceComm::abort() {
  const std::lock_guard<std::mutex> lock(parts_mutex_);
  if (parts_ == nullptr || !owner_.is_this_process()) return;
  hsgd_error error;
  report(&error, HSGD_ERR_CLOSED, -1, "the communicator was aborted");
  parts_->path.thread().fail(error);
}

void DeviceComm::check() const {
  hsgd_error error;
  if (parts_ == nullptr || !parts_->path.thread().has_failed(&error)) return;
  if (error.code == HSGD_ERR_SIGNATURE) {
    throw MismatchError(error.rank, error.message, error.sides[0], error.sides[1]);
  }
  throw Error(static_cast<hsgd_status>(error.code), error.rank, error.message);
}

std::shared_ptr<DeviceWork> DeviceComm::start(const DeviceCall& call, const Streams& streams) {
  if (!owner_.is_this_process()) {
    throw_error(HSGD_ERR_CLOSED, -1,
                "this process was forked from the one that made the communicator; CUDA and hsgd do "
                "not work in forked processes; start them with multiprocessing's \"spawn\"");
  }
  check_arguments(call, topology_.rank);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_finished_) throw_error(HSGD_ERR_CLOSED, -1, "this communicator is closed");
  check();
  const Device::Current current(*device_);
  if (input_ == nullptr) input_ = events_->take();
  for (const CudaStream stream : streams) {
    if (!device_->is_capturing(stream)) continue;
    throw_invalid(
        "the stream is being captured into a CUDA graph, which cannot record the CPU's "
        "part of this collective; call it outside of the capture");
  }
  auto work = std::make_shared<DeviceWork>(device_, events_);
  hsgd_error error;
  const int status = guarded(&error, [&] { queue(call, streams, *work); });
  if (status == HSGD_OK) return work;
  if (parts_ != nullptr) {
    parts_->path.thread().fail(error);
    check();  // the first failure is the cause
  }
  throw Error(static_cast<hsgd_status>(status), error.rank, error.message);
}

void DeviceComm::come_after(const Streams& streams, CudaStream later) {
  for (const CudaStream stream : streams) {
    if (stream == later) continue;
    device_->record(*input_, stream);
    device_->wait(later, *input_);
  }
}

void DeviceComm::queue(const DeviceCall& call, const Streams& streams, const DeviceWork& work) {
  if (topology_.size == 1) {
    copy_alone(call, streams, work);
    return;
  }
  NcclPath* nccl = parts_->nccl.get();
  if (nccl != nullptr && nccl->takes(call)) {
    come_after(streams, nccl->stream());
    nccl->pass(parts_->path, call);
    device_->record(work.event(), nccl->stream());
    return;
  }
  HostPath& path = parts_->path;
  come_after(streams, path.down());
  path.pass(call);
  device_->record(work.event(), path.up());
}

// Runs the call of a communicator with one rank.
void DeviceComm::copy_alone(const DeviceCall& call, const Streams& streams,
                            const DeviceWork& work) {
  const uint64_t count = call.counts.empty() ? call.count : call.counts.front();
  const size_t bytes = count * hsgd_dtype_bytes(call.dtype);
  come_after(streams, streams.front());
  if (bytes > 0 && call.in != call.out)
    device_->copy_within(call.out, call.in, bytes, streams.front());
  device_->record(work.event(), streams.front());
}

}  // namespace hsgd
