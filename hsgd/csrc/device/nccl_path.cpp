// NcclPath: runs collectives over NCCL on one node, chunk by chunk between nodes, and checks
// awaited ranks.
#include "device/nccl_path.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/c/handles.hpp"
#include "core/base/error.hpp"
#include "core/os/wait.hpp"

namespace hsgd {
namespace {

constexpr int64_t kNsPerS = 1'000'000'000;
// The time for other ranks to finish after one has ended. A rank may end when its own device is
// done; ranks that already have all its data finish soon after.
constexpr int64_t kGraceNs = 2 * kNsPerS;
constexpr double kPatienceS = 10;  // for queued work, when all of it is known to be done
// Below this size the latency of NCCL's two operations exceeds the time of the copies.
constexpr uint64_t kLeastBytes = 64 << 10;

hsgd_topology topology_of(const hsgd_comm* comm) {
  hsgd_topology topology;
  hsgd_comm_topology(comm, &topology);
  return topology;
}

}  // namespace

// The data that is summed at once: a slice for each rank of the node.
class NcclPath::Chunks {
 public:
  Chunks(const DeviceCall& call, const NcclGroup& group, size_t slice_bytes)
      : item_(hsgd_dtype_bytes(call.dtype)),
        count_(call.count),
        ranks_(static_cast<uint64_t>(group.size())),
        elements_(slice_bytes / item_ * ranks_) {}
  uint64_t size() const { return (count_ + elements_ - 1) / elements_; }
  size_t offset(uint64_t index) const { return index * elements_ * item_; }
  // Returns the elements of each rank's slice.
  std::vector<uint64_t> counts(uint64_t index) const {
    const uint64_t all = std::min(elements_, count_ - index * elements_);
    std::vector<uint64_t> counts(ranks_, all / ranks_);
    for (uint64_t rank = 0; rank < all % ranks_; ++rank) ++counts[rank];
    return counts;
  }

 private:
  const size_t item_;
  const uint64_t count_;
  const uint64_t ranks_;
  const uint64_t elements_;
};

// Device memory for the slices that this rank exchanges, used in turn.
struct NcclPath::Slices {
  Slices(const Device& of, size_t slice_bytes, unsigned count)
      : device(of), bytes(slice_bytes), memory(of.allocate(slice_bytes * count)), reduced(of) {
    for (unsigned i = 0; i < count; ++i) arrived.push_back(std::make_unique<OwnEvent>(of));
  }
  ~Slices() { device.free(memory); }
  Slices(const Slices&) = delete;
  Slices& operator=(const Slices&) = delete;
  DeviceAddress slice(uint64_t chunk) const { return memory + chunk % arrived.size() * bytes; }
  CudaEvent event(uint64_t chunk) const { return *arrived[chunk % arrived.size()]; }

  const Device& device;
  const size_t bytes;
  const DeviceAddress memory;
  OwnEvent reduced;
  std::vector<std::unique_ptr<OwnEvent>> arrived;
};

NcclPath::NcclPath(std::shared_ptr<const Device> device, const Settings& settings)
    : device_(std::move(device)),
      settings_(settings),
      topology_(topology_of(settings.comm)),
      stream_(*device_),
      drained_(*device_) {
  const hsgd_options& options = settings.comm->communicator->options();
  const Deadline deadline(options.timeout_s, options.interrupted);
  group_ = std::make_unique<NcclGroup>(
      settings.library, device_, settings.id, topology_.local_rank, topology_.local_size, [&] {
        check_peers();
        if (deadline.interrupted()) throw_error(HSGD_ERR_INTERRUPTED, -1, "interrupted");
        if (deadline.passed()) {
          throw_error(HSGD_ERR_TIMEOUT, -1,
                      "NCCL has not connected the %d devices of this node within %g s; set "
                      "NCCL_DEBUG=INFO to see what it waits for",
                      topology_.local_size, deadline.timeout_s());
        }
      });
  if (settings.between != nullptr)
    slices_ = std::make_unique<Slices>(*device_, settings.slice_bytes, settings.slots);
}

NcclPath::~NcclPath() {
  const Deadline patience(kPatienceS);
  if (left_behind_ || !group_->has_ended() || !device_->drains(stream_, drained_, patience))
    static_cast<void>(slices_.release());  // hanging work may use them forever
}

bool NcclPath::takes(const DeviceCall& call) const {
  if (settings_.between == nullptr) return true;
  return call.kind == HSGD_ALLREDUCE && call.count * hsgd_dtype_bytes(call.dtype) >= kLeastBytes;
}

void NcclPath::pass(HostPath& path, const DeviceCall& call) {
  path.begin(call, stream_);
  if (settings_.between == nullptr) {
    on_one_node(call);
  } else {
    between_nodes(path, call);
  }
  path.end(stream_);
}

void NcclPath::on_one_node(const DeviceCall& call) {
  switch (call.kind) {
    case HSGD_ALLREDUCE:
      return group_->allreduce(call.in, call.out, call.count, call.dtype, call.op, stream_);
    case HSGD_BROADCAST:
      return group_->broadcast(call.out, call.count, call.dtype, call.root, stream_);
    case HSGD_REDUCE_SCATTER:
      return group_->reduce_scatter(call.in, call.out, call.counts, call.dtype, call.op, stream_);
    case HSGD_ALLGATHER:
      return group_->allgather(call.in, call.out, call.counts, call.dtype, stream_);
    case HSGD_ALLTOALL:
      return group_->alltoall(call.in, call.counts, call.out, call.receive_counts, call.dtype,
                              stream_);
    default:
      HSGD_CHECK(false);
  }
}

// Runs the call chunk by chunk: the devices of the node sum a chunk, one slice each; ranks of
// different nodes sum the slices through host memory; then the slices are gathered. NCCL executes
// its operations in the order of the calls, so the end of a chunk is queued when the slices of
// later chunks are in transit.
void NcclPath::between_nodes(HostPath& path, const DeviceCall& call) {
  const Chunks chunks(call, *group_, slices_->bytes);
  const uint64_t ahead = settings_.slots - 1;
  for (uint64_t index = 0; index < chunks.size() + ahead; ++index) {
    if (index < chunks.size()) scatter(path, call, chunks, index);
    if (index >= ahead) gather(call, chunks, index - ahead);
  }
}

void NcclPath::scatter(HostPath& path, const DeviceCall& call, const Chunks& chunks,
                       uint64_t index) {
  const DeviceAddress slice = slices_->slice(index);
  const std::vector<uint64_t> counts = chunks.counts(index);
  group_->reduce_scatter(call.in + chunks.offset(index), slice, counts, call.dtype, call.op,
                         stream_);
  device_->record(slices_->reduced, stream_);
  device_->wait(path.down(), slices_->reduced);
  DeviceStep step;
  step.count = counts[static_cast<size_t>(group_->rank())];
  step.result_bytes = step.count * hsgd_dtype_bytes(call.dtype);
  step.down = step.up = {{slice, 0, step.result_bytes}};
  path.pass_step(path.shared_ring(), call, step, settings_.between);
  device_->record(slices_->event(index), path.up());
}

void NcclPath::gather(const DeviceCall& call, const Chunks& chunks, uint64_t index) {
  device_->wait(stream_, slices_->event(index));
  group_->allgather(slices_->slice(index), call.out + chunks.offset(index), chunks.counts(index),
                    call.dtype, stream_);
}

void NcclPath::check_peers() {
  settings_.comm->communicator->node().check_peers(LocalGroup::kAnySequence, "NCCL");
}

// Checks for dead ranks; runs in the exchange thread.
void NcclPath::look(int64_t waited_ns) {
  if (waited_ns < waited_ns_) dead_since_ns_ = 0;  // a new wait has begun
  waited_ns_ = waited_ns;
  const int64_t now = now_ns();
  const double timeout_s = settings_.comm->communicator->options().timeout_s;
  if (static_cast<double>(waited_ns) > timeout_s * static_cast<double>(kNsPerS)) {
    throw_error(HSGD_ERR_TIMEOUT, -1,
                "the devices of this node have not finished an operation of NCCL within %g s",
                timeout_s);
  }
  try {
    check_peers();
  } catch (const Error&) {
    if (dead_since_ns_ == 0) dead_since_ns_ = now;
    if (now - dead_since_ns_ > kGraceNs) throw;
  }
}

}  // namespace hsgd
