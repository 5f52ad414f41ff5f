// HostPath: manages slots and queues the work of each step.
#include "device/host_path.hpp"

#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"
#include "core/os/wait.hpp"

namespace hsgd {
namespace {

hsgd_buffer* allocated(hsgd_comm* comm, size_t bytes) {
  hsgd_buffer* buffer = nullptr;
  hsgd_error error;
  const hsgd_label label = {"slots of device memory", nullptr, 0};
  const int status = hsgd_comm_allocate(comm, bytes, HSGD_UINT8, &label, &buffer, &error);
  if (status != HSGD_OK) throw Error(static_cast<hsgd_status>(status), error.rank, error.message);
  return buffer;
}

hsgd_call host_call(const DeviceCall& call, const DeviceStep& step, std::byte* slot) {
  hsgd_call host{};
  host.kind = call.kind;
  host.in = slot + step.in;
  host.out = slot + step.out;
  host.count = step.count;
  host.dtype = call.dtype;
  host.op = call.op;
  host.root = call.root;
  return host;
}

}  // namespace

SlotRing::SlotRing(const Device& device, std::byte* memory, size_t slot_bytes, unsigned count)
    : memory_(memory), slot_bytes_(slot_bytes) {
  for (unsigned i = 0; i < count; ++i) free_.push_back(std::make_unique<OwnEvent>(device));
}

SlotRing::Slot SlotRing::next() {
  const size_t index = turn_++ % free_.size();
  return {memory_ + index * slot_bytes_, *free_[index]};
}

HostPath::HostPath(const Device& device, const std::vector<hsgd_comm*>& comms, size_t slot_bytes,
                   unsigned slots, DeviceGuard* guard)
    : device_(device),
      comm_(comms.front()),
      slots_(slots),
      buffer_(allocated(comm_, slots * slot_bytes)),
      guard_(guard),
      has_copied_(std::make_unique<Signal>(device)),
      has_passed_(std::make_unique<Signal>(device)),
      may_copy_(std::make_unique<Signal>(device)),
      down_(device),
      up_(device),
      exchanges_(first_count_32()),
      marks_(first_count_32()) {
  hsgd_comm_topology(comm_, &topology_);
  const size_t bytes = slots * slot_bytes;
  auto* memory = static_cast<std::byte*>(hsgd_buffer_data(buffer_.get()));
  registration_ = std::make_unique<Registration>(device, memory, bytes);
  shared_ = std::make_unique<SlotRing>(device, memory, slot_bytes, slots);
  thread_ = std::make_unique<ExchangeThread>(
      ExchangeThread::Signals{*has_copied_, *has_passed_, *may_copy_}, comms, guard);
}

HostPath::~HostPath() { static_cast<void>(finish()); }

bool HostPath::finish() {
  if (thread_ == nullptr) return true;
  constexpr double kLookS = 0.02;
  constexpr double kPatienceS = 30;  // after a failure, for waiting kernels to end
  std::optional<Deadline> patience;
  bool hangs = false;
  while (!thread_->wait_until_idle(kLookS)) {
    if (!patience && thread_->has_failed(nullptr)) patience.emplace(kPatienceS);
    hangs = patience && patience->passed();
    if (hangs || device_.is_lost(shared_->next().is_free)) thread_->give_device_up();
  }
  thread_.reset();
  if (!patience) patience.emplace(kPatienceS);
  const CudaEvent event = shared_->next().is_free;
  for (const CudaStream stream : {CudaStream(down_), CudaStream(up_)})
    hangs = hangs || !device_.drains(stream, event, *patience);
  if (hangs) leave_behind();
  return !hangs;
}

// Leaves everything behind, because hanging work may use it forever.
void HostPath::leave_behind() {
  if (guard_ != nullptr) guard_->leave_behind();
  static_cast<void>(registration_.release());
  static_cast<void>(buffer_.release());
  static_cast<void>(pinned_.release());
  static_cast<void>(has_copied_.release());
  static_cast<void>(has_passed_.release());
  static_cast<void>(may_copy_.release());
}

SlotRing& HostPath::ring_for(const DeviceCall& call) {
  const size_t least =
      DeviceSteps::least_slot_bytes(call.kind, static_cast<int>(call.counts.size()));
  if (call.counts.empty() || least <= shared_->slot_bytes()) return *shared_;
  if (own_ == nullptr || own_->slot_bytes() < least) {
    if (own_ != nullptr) device_.synchronize(up_);  // its slots may be in use
    own_.reset();
    pinned_.reset();
    pinned_ = std::make_unique<PinnedMemory>(device_, slots_ * least);
    own_ = std::make_unique<SlotRing>(device_, pinned_->data(), least, slots_);
  }
  return *own_;
}

HostTask HostPath::new_task(const DeviceCall& call, HostTask::Kind kind) {
  HostTask task;
  task.kind = kind;
  task.number = kind == HostTask::Kind::kExchange ? ++exchanges_ : ++marks_;
  task.is_guarded = is_guarded_;
  task.name = call.name;
  task.shape = call.shape;
  return task;
}

void HostPath::pass(const DeviceCall& call) {
  SlotRing& ring = ring_for(call);
  const DeviceSteps steps(call, topology_.rank, ring.slot_bytes());
  for (uint64_t index = 0; index < steps.size(); ++index) {
    pass_step(ring, call, steps.step(index), comm_);
  }
}

void HostPath::pass_step(SlotRing& ring, const DeviceCall& call, const DeviceStep& step,
                         hsgd_comm* comm) {
  const SlotRing::Slot slot = ring.next();
  HostTask task = new_task(call, HostTask::Kind::kExchange);
  device_.wait(down_, slot.is_free);
  for (const DevicePiece& piece : step.down) {
    if (piece.bytes == 0) continue;
    device_.copy_down(slot.memory + piece.offset, piece.device, piece.bytes, down_);
  }
  device_.write(down_, has_copied_->address(), task.number);
  task.comm = comm;
  task.call = host_call(call, step, slot.memory);
  task.counts = step.counts;
  task.receive_counts = step.receive_counts;
  task.result = slot.memory + step.out;
  task.result_bytes = step.result_bytes;
  thread_->submit(std::move(task));
  device_.wait_for(up_, may_copy_->address(), exchanges_);
  for (const DevicePiece& piece : step.up) {
    if (piece.bytes == 0) continue;
    device_.copy_up(piece.device, slot.memory + piece.offset, piece.bytes, up_);
  }
  device_.record(slot.is_free, up_);
}

void HostPath::begin(const DeviceCall& call, CudaStream stream) {
  HostTask task = new_task(call, HostTask::Kind::kAgree);
  device_.write(stream, has_passed_->address(), task.number);
  task.comm = comm_;
  task.call = host_call(call, {}, nullptr);
  task.counts.assign(call.counts.size(), 0);
  task.receive_counts.assign(call.receive_counts.size(), 0);
  if (call.kind != HSGD_ALLTOALL)  // each rank has its own counts
    task.shape.insert(task.shape.end(), call.counts.begin(), call.counts.end());
  thread_->submit(std::move(task));
  is_guarded_ = true;
}

void HostPath::end(CudaStream stream) {
  HostTask task = new_task({}, HostTask::Kind::kAwait);
  device_.write(stream, has_passed_->address(), task.number);
  thread_->submit(std::move(task));
  is_guarded_ = false;
}

}  // namespace hsgd
