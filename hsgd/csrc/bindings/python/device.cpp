// The Python binding of collectives on device memory, given by addresses that Python has checked.
// No logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"
#include "device/device_comm.hpp"

namespace hsgd::python {
namespace {

// Contiguous memory of a device, which the caller keeps.
struct DeviceMemory {
  uintptr_t address;
  hsgd_dtype dtype;
  std::vector<int64_t> shape;
  uint64_t count() const {
    uint64_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<uint64_t>(extent);
    return count;
  }
};

using Counts = std::vector<uint64_t>;    // elements, one per rank
using Streams = std::vector<uintptr_t>;  // of the arrays, at least one
using Label = std::optional<std::string>;

DeviceCall call_of(hsgd_kind kind, const DeviceMemory& source, const DeviceMemory& target,
                   const Label& name) {
  DeviceCall call;
  call.kind = kind;
  call.in = source.address;
  call.out = target.address;
  call.count = source.count();
  call.dtype = source.dtype;
  call.shape = source.shape;
  if (name) call.name = std::make_shared<const std::string>(*name);
  return call;
}

class DeviceComm {
 public:
  // `comm`, `between`: addresses of the communicators' std::shared_ptr, see Comm.shared_address(),
  // or 0.
  DeviceComm(uintptr_t comm, uintptr_t between, const DeviceOptions& options)
      : comm_(without_gil([&] {
          return std::make_shared<hsgd::DeviceComm>(shared(comm), shared(between), options);
        })) {}
  ~DeviceComm() { close(); }

  using Work = std::shared_ptr<DeviceWork>;

  Work allreduce(const DeviceMemory& source, const DeviceMemory& target, int op,
                 const Streams& streams, const Label& name) {
    DeviceCall call = call_of(HSGD_ALLREDUCE, source, target, name);
    call.op = static_cast<hsgd_op>(op);
    return start(call, streams);
  }

  Work broadcast(const DeviceMemory& data, int root, const Streams& streams, const Label& name) {
    DeviceCall call = call_of(HSGD_BROADCAST, data, data, name);
    call.root = root;
    return start(call, streams);
  }

  Work reduce_scatter(const DeviceMemory& source, const DeviceMemory& target, int op, Counts counts,
                      const Streams& streams, const Label& name) {
    DeviceCall call = call_of(HSGD_REDUCE_SCATTER, source, target, name);
    call.op = static_cast<hsgd_op>(op);
    call.counts = std::move(counts);
    return start(call, streams);
  }

  Work allgather(const DeviceMemory& source, const DeviceMemory& target, Counts counts,
                 const Streams& streams, const Label& name) {
    DeviceCall call = call_of(HSGD_ALLGATHER, source, target, name);
    if (call.shape.empty()) call.shape.push_back(-1);  // one row
    call.shape.front() = -1;                           // may differ between ranks
    call.counts = std::move(counts);
    return start(call, streams);
  }

  // `longest`: elements of the longest block of all ranks. `is_even`: blocks are equal on all
  // ranks.
  Work alltoall(const DeviceMemory& source, const DeviceMemory& target, Counts send_counts,
                Counts receive_counts, uint64_t longest, bool is_even, const Streams& streams,
                const Label& name) {
    DeviceCall call = call_of(HSGD_ALLTOALL, source, target, name);
    if (!is_even && !call.shape.empty()) call.shape.front() = -1;
    call.counts = std::move(send_counts);
    call.receive_counts = std::move(receive_counts);
    call.longest = longest;
    return start(call, streams);
  }

  // May be called while another thread is in close().
  void abort() const {
    std::shared_ptr<hsgd::DeviceComm> comm = known_.lock();
    if (comm == nullptr) return;
    const ReleasedGil released;
    comm->abort();
    comm.reset();
  }

  void check() const {
    check_open();
    hsgd_error error;
    raise_on_error(guarded(&error, [&] { comm_->check(); }), error);
  }

  // Closes the communicator; a call of another thread keeps it until that call has returned.
  // Returns false if the device hangs: then it may use the arrays forever.
  bool close() {
    std::shared_ptr<hsgd::DeviceComm> comm = std::move(comm_);
    if (comm == nullptr) return true;
    const ReleasedGil released;
    const bool is_done = comm->finish();
    comm.reset();
    return is_done;
  }

 private:
  static std::shared_ptr<hsgd_comm> shared(uintptr_t address) {
    if (address == 0) return nullptr;
    return *reinterpret_cast<const std::shared_ptr<hsgd_comm>*>(address);
  }

  void check_open() const {
    if (comm_ == nullptr) raise_closed("communicator");
  }

  Work start(const DeviceCall& call, const Streams& streams) {
    check_open();
    std::shared_ptr<hsgd::DeviceComm> comm = comm_;
    std::vector<CudaStream> handles;
    for (const uintptr_t each : streams) handles.push_back(reinterpret_cast<CudaStream>(each));
    return without_gil([&] {
      // This may be the last reference: another thread may have closed it.
      const std::shared_ptr<hsgd::DeviceComm> held = std::move(comm);
      return held->start(call, handles);
    });
  }

  std::shared_ptr<hsgd::DeviceComm> comm_;
  std::weak_ptr<hsgd::DeviceComm> known_ = comm_;
};

void order(const DeviceWork& work, uintptr_t stream) {
  without_gil([&] { work.order(reinterpret_cast<CudaStream>(stream)); });
}

bool done(const DeviceWork& work) {
  return without_gil([&] { return work.done(); });
}

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<DeviceMemory>(module, "DeviceMemory")
      .def(
          "__init__",
          [](DeviceMemory* self, uintptr_t address, int dtype, std::vector<int64_t> shape) {
            new (self) DeviceMemory{address, static_cast<hsgd_dtype>(dtype), std::move(shape)};
          },
          nb::arg("address"), nb::arg("dtype"), nb::arg("shape"));
  nb::class_<DeviceWork>(module, "DeviceWork")
      .def("order", &order, nb::arg("stream"))
      .def("done", &done);
  const auto source = nb::arg("source");
  const auto target = nb::arg("target");
  const auto streams = nb::arg("streams");
  const auto name = nb::arg("name").none();
  nb::class_<DeviceComm>(module, "DeviceComm")
      .def(
          "__init__",
          [](DeviceComm* self, uintptr_t comm, uintptr_t between, const std::string& cuda_library,
             const std::string& nccl_library, const nb::bytes& nccl_id, int ordinal,
             size_t chunk_bytes, unsigned slots) {
            DeviceOptions options{cuda_library, nccl_library, {}, ordinal, chunk_bytes, slots};
            std::memcpy(options.nccl_id.bytes, nccl_id.c_str(),
                        std::min(nccl_id.size(), sizeof options.nccl_id.bytes));
            new (self) DeviceComm(comm, between, options);
          },
          nb::kw_only(), nb::arg("comm"), nb::arg("between"), nb::arg("cuda_library"),
          nb::arg("nccl_library"), nb::arg("nccl_id"), nb::arg("ordinal"), nb::arg("chunk_bytes"),
          nb::arg("slots"))
      .def("allreduce", &DeviceComm::allreduce, source, target, nb::arg("op"), streams, name)
      .def("broadcast", &DeviceComm::broadcast, nb::arg("data"), nb::arg("root"), streams, name)
      .def("reduce_scatter", &DeviceComm::reduce_scatter, source, target, nb::arg("op"),
           nb::arg("counts"), streams, name)
      .def("allgather", &DeviceComm::allgather, source, target, nb::arg("counts"), streams, name)
      .def("alltoall", &DeviceComm::alltoall, source, target, nb::arg("send_counts"),
           nb::arg("receive_counts"), nb::arg("longest"), nb::arg("is_even"), streams, name)
      .def("abort", &DeviceComm::abort)
      .def("check", &DeviceComm::check)
      .def("close", &DeviceComm::close);
  module.def(
      "device_uuid",
      [](const std::string& cuda_library, int ordinal) {
        const CudaUuid uuid = without_gil([&] { return Device(cuda_library, ordinal).uuid(); });
        return nb::bytes(uuid.bytes, sizeof uuid.bytes);
      },
      nb::arg("cuda_library"), nb::arg("ordinal"));
  module.def(
      "device_of_address",
      [](const std::string& cuda_library, uintptr_t address) {
        return without_gil([&] { return Device::ordinal_of(cuda_library, address); });
      },
      nb::arg("cuda_library"), nb::arg("address"));
  module.def(
      "nccl_version",
      [](const std::string& library) {
        return without_gil([&] { return NcclLibrary(library).version(); });
      },
      nb::arg("nccl_library"));
  module.def(
      "new_nccl_id",
      [](const std::string& nccl_library) {
        const NcclId id = without_gil([&] { return NcclLibrary(nccl_library).new_id(); });
        return nb::bytes(id.bytes, sizeof id.bytes);
      },
      nb::arg("nccl_library"));
}

}  // namespace hsgd::python
