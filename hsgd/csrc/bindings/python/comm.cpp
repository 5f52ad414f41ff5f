// The Python binding of communicators and their requests.
//
// Owns the arrays of collectives in progress, and the MPI part, which is loaded on demand; no
// logic.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays/array.hpp"
#include "bindings/c/comm_over_tcp.hpp"
#include "bindings/c/handles.hpp"
#include "bindings/mpi_communicators/window.hpp"
#include "bindings/python/bindings.hpp"
#include "bindings/python/collective_call.hpp"
#include "bindings/python/collectives.hpp"
#include "bindings/python/errors.hpp"
#include "bindings/python/group_calls.hpp"
#include "bindings/python/window.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "hsgd_mpi.h"
#include "network/tcp_messages/tcp_leader.hpp"

namespace hsgd::python {
namespace {

class MpiLibrary {
 public:
  explicit MpiLibrary(const std::string& path)
      : handle_(::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (handle_ == nullptr) fail(::dlerror());
    create_ = reinterpret_cast<decltype(create_)>(::dlsym(handle_, "hsgd_mpi_comm_create"));
    version_ = reinterpret_cast<decltype(version_)>(::dlsym(handle_, "hsgd_mpi_library_version"));
    rma_ = reinterpret_cast<decltype(rma_)>(::dlsym(handle_, "hsgd_mpi_rma_create"));
    if (create_ != nullptr && version_ != nullptr && rma_ != nullptr) return;
    fail("it lacks functions that this version of hsgd calls; build hsgd again");
  }
  // Never unloaded: MPI keeps callbacks into it until the process ends.

  std::string version() const {
    char text[256] = {};
    version_(text, sizeof text);
    return text;
  }

  hsgd_comm* create(uintptr_t address, const Options& options) const {
    hsgd_comm* comm = nullptr;
    call_core([&](hsgd_error* error) {
      return create_(reinterpret_cast<const void*>(address), &options, &comm, error);
    });
    return comm;
  }

  // Creates the network over MPI. Called without the GIL.
  std::unique_ptr<Rma> rma(uintptr_t address, hsgd_comm& comm, void* base, size_t bytes) const {
    std::unique_ptr<Rma> rma;
    rma_(reinterpret_cast<const void*>(address), comm, base, bytes, rma);
    return rma;
  }

 private:
  [[noreturn]] static void fail(const std::string& reason) {
    const nb::object type = nb::module_::import_("hsgd.errors").attr("LaunchError");
    PyErr_SetObject(type.ptr(),
                    nb::str(("hsgd's MPI part cannot be loaded: " + reason).c_str()).ptr());
    throw nb::python_error();
  }

  void* handle_;
  decltype(&hsgd_mpi_comm_create) create_;
  decltype(&hsgd_mpi_library_version) version_;
  decltype(&hsgd_mpi_rma_create) rma_;
};

// The state of a rank that carries data between nodes over TCP.
class Leader {
 public:
  Leader(const std::string& interfaces, int nodes)
      : leader_(without_gil([&] { return std::make_unique<TcpLeader>(interfaces, nodes); })) {}

  nb::bytes address() const { return nb::bytes(&leader_->place(), sizeof(SocketPlace)); }

  // Connects. `addresses`: addresses of the leaders, by node, one after the other.
  void connect(const nb::bytes& addresses, const std::vector<int>& ranks, int node,
               const Options& options) const {
    if (addresses.size() != ranks.size() * sizeof(SocketPlace)) {
      throw nb::value_error("addresses: give one per node");
    }
    TcpLeaders leaders{std::vector<SocketPlace>(ranks.size()), ranks, node};
    std::memcpy(leaders.places.data(), addresses.data(), addresses.size());
    for (int& rank : leaders.ranks) {
      if (options.rank_names != nullptr) rank = options.rank_names[rank];
    }
    without_gil([&] {
      check_options(options);
      leader_->connect(std::move(leaders), Deadline(options.timeout_s, options.interrupted));
    });
  }

  TcpLeader* get() const { return leader_.get(); }
  void forget() { leader_.reset(); }

 private:
  std::unique_ptr<TcpLeader> leader_;  // nullptr once a communicator has been made of it
};

class Comm {
 public:
  explicit Comm(hsgd_comm* comm) : comm_(comm, hsgd_comm_destroy) {
    hsgd_comm_topology(comm, &topology_);
  }
  Comm(Comm&&) = default;
  ~Comm() {
    if (comm_ == nullptr) return;
    const nb::error_scope earlier;
    release();
    if (PyErr_Occurred() != nullptr) PyErr_WriteUnraisable(Py_None);  // Ctrl-C ended the wait
  }

  static Comm local(const std::string& path, int rank, int size, const Options& options) {
    hsgd_comm* comm = nullptr;
    call_core([&](hsgd_error* error) {
      return hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, error);
    });
    return Comm(comm);
  }

  // Creates a communicator over TCP. `leader`: set on ranks that lead between nodes; not usable
  // afterwards.
  static Comm over_tcp(const std::string& path, const std::vector<int>& node_of_rank,
                       const std::vector<int>& nic_of_rank, int rank, Leader* leader,
                       const Options& options) {
    hsgd_comm* comm = without_gil([&] {
      return new_comm_over_tcp(path, {node_of_rank, nic_of_rank}, rank,
                               leader == nullptr ? nullptr : leader->get(), options);
    });
    if (leader != nullptr) leader->forget();
    return Comm(comm);
  }

  // `fill` describes the collective; see Collective.
  template <class Fill>
  nb::object run(Fill&& fill) {
    Collective collective(topology_);
    fill(collective);
    run(collective);
    return collective.result();
  }

  // Does the same if `fill` returns true; otherwise returns false, having done nothing.
  template <class Fill>
  bool run_if(Fill&& fill) {
    Collective collective(topology_);
    if (!fill(collective)) return false;
    run(collective);
    return true;
  }

  template <class Fill>
  Request start(Fill&& fill) {
    const auto submitted = std::make_shared<Submitted>(topology_);
    fill(submitted->collective);
    hsgd_error error;
    raise_on_error(start(submitted, &error), error);
    return Request(submitted);
  }

  // Does the same if `fill` returns true and the core accepts the collective: between nodes it
  // accepts none if MPI allows calls of only one thread at a time.
  template <class Fill>
  std::optional<Request> start_if(Fill&& fill) {
    const auto submitted = std::make_shared<Submitted>(topology_);
    hsgd_error error;
    if (!fill(submitted->collective) || start(submitted, &error) != HSGD_OK) return std::nullopt;
    return Request(submitted);
  }

  // Returns the bytes of a shared buffer, which lives as long as the array and everything made of
  // it.
  Anything allocate(int dtype, const std::vector<int64_t>& shape, bool once_per_node,
                    const Name& name) {
    uint64_t count = 1;
    for (const int64_t extent : shape) {
      if (__builtin_mul_overflow(count, static_cast<uint64_t>(extent), &count)) {
        throw nb::value_error("the product of the extents is too large; give smaller ones");
      }
    }
    const hsgd_label label = {text_of(name), shape.data(), static_cast<int32_t>(shape.size())};
    hsgd_buffer* buffer = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) {
      const auto make = once_per_node ? hsgd_comm_allocate_shared : hsgd_comm_allocate;
      return make(comm, count, static_cast<hsgd_dtype>(dtype), &label, &buffer, error);
    });
    const nb::capsule owner(
        buffer, [](void* memory) noexcept { hsgd_buffer_free(static_cast<hsgd_buffer*>(memory)); });
    const size_t bytes = count * hsgd_dtype_bytes(static_cast<hsgd_dtype>(dtype));
    return nb::cast(
        nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(hsgd_buffer_data(buffer), {bytes}, owner));
  }

  std::optional<Comm> split(int color, int key, const std::optional<std::vector<int>>& names) {
    hsgd_comm* part = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_split(comm, color, key, names ? names->data() : nullptr, &part, error);
    });
    if (part == nullptr) return std::nullopt;
    return Comm(part);
  }

  // Opens a window. `mpi`, `address`: the library and the MPI communicator's address, if other
  // nodes are reached over MPI; else nullptr.
  NotifiedWindow window(const WindowOptions& options, const MpiLibrary* mpi, uintptr_t address) {
    check_open();
    const std::shared_ptr<hsgd_comm> comm = comm_;  // a copy, because another thread may close this
    hsgd::NotifiedWindow::MakeRma over_mpi;
    if (mpi != nullptr) {
      over_mpi = [&](void* base, size_t bytes) { return mpi->rma(address, *comm, base, bytes); };
    }
    return NotifiedWindow(comm, without_gil([&] { return new_window(*comm, options, over_mpi); }));
  }

  // Returns the shrunk communicator. The caller must close the old one.
  Comm shrink(double timeout_s) {
    hsgd_comm* shrunk = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_shrink(comm, timeout_s, &shrunk, error);
    });
    return Comm(shrunk);
  }

  // Closes the communicator. A collective of another thread keeps it until it ends.
  void close() {
    release();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();  // Ctrl-C ended the wait
    forget_done();
  }

  // Calls a function of the core that may come after close().
  template <void (*function)(hsgd_comm*)>
  void call() const {
    if (comm_ != nullptr) function(comm_.get());
  }

  void expire(double timeout_s) const {
    if (comm_ != nullptr) hsgd_comm_expire(comm_.get(), timeout_s);
  }

  bool stop_requested() const {
    return comm_ != nullptr && hsgd_comm_stop_requested(comm_.get()) != 0;
  }

  void explain_leaving(const std::string& words) const {
    if (comm_ != nullptr) hsgd_comm_explain_leaving(comm_.get(), words.c_str());
  }

  void keep_records(uint64_t capacity) const {
    check_open();
    hsgd_comm_keep_records(comm_.get(), capacity);
  }

  using Span = std::tuple<int64_t, int64_t, int64_t>;  // begin, end and busy time, in ns
  using Record = std::tuple<nb::str, uint64_t, std::vector<Span>>;

  // Returns for each record: name, bytes, and the spans of the call and of each level.
  std::vector<Record> take_records() const {
    check_open();
    constexpr uint64_t kAtOnce = 32;
    hsgd_record records[kAtOnce];
    std::vector<Record> taken;
    for (;;) {
      const uint64_t count = hsgd_comm_take_records(comm_.get(), records, kAtOnce);
      for (const hsgd_record* record = records; record < records + count; ++record) {
        std::vector<Span> spans;
        for (const hsgd_span* span :
             {&record->call, &record->reduce, &record->inter, &record->gather}) {
          spans.emplace_back(span->begin_ns, span->end_ns, span->busy_ns);
        }
        taken.emplace_back(nb::str(decoded(record->name)), record->bytes, spans);
      }
      if (count < kAtOnce) return taken;
    }
  }

  bool closed() const { return comm_ == nullptr; }
  // Returns true if close() would wait for requests.
  bool has_open() {
    forget_done();
    return !open_.empty();
  }
  const hsgd_topology& topology() const { return topology_; }
  std::vector<int> rank_names() const {
    check_open();
    std::vector<int> names;
    for (int rank = 0; rank < topology_.size; ++rank)
      names.push_back(hsgd_comm_rank_name(comm_.get(), rank));
    return names;
  }
  std::vector<int> nodes() const {
    check_open();
    std::vector<int> nodes;
    for (int rank = 0; rank < topology_.size; ++rank)
      nodes.push_back(hsgd_comm_node_of(comm_.get(), rank));
    return nodes;
  }

  // Returns the address of the std::shared_ptr that torch's operators copy: see
  // bindings/torch_operators/registry.hpp.
  uintptr_t shared_address() const {
    check_open();
    return reinterpret_cast<uintptr_t>(&comm_);
  }

  void tell_hosts(const std::string& hosts) const {
    check_open();
    hsgd_comm_tell_hosts(comm_.get(), hosts.c_str());
  }

  // Returns the descriptor. The only function that a forked child may call.
  int descriptor() const { return comm_ == nullptr ? -1 : hsgd_comm_descriptor(comm_.get()); }

  hsgd_counters counters() const {
    check_open();
    hsgd_counters counters{};
    std::shared_ptr<hsgd_comm> comm = comm_;
    const ReleasedGil released;  // waits for a collective of another thread
    hsgd_comm_counters(comm.get(), &counters);
    comm.reset();
    return counters;
  }

 private:
  void check_open() const {
    if (comm_ == nullptr) raise_closed("communicator");
  }

  int start(const std::shared_ptr<Submitted>& submitted, hsgd_error* error) {
    forget_done();
    check_open();
    const hsgd_call& call = submitted->collective.call();
    const int status = hsgd_comm_start(comm_.get(), &call, &submitted->request, error);
    if (status == HSGD_OK) open_.push_back(submitted);
    return status;
  }

  void run(Collective& collective) {
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_run(comm, &collective.call(), error);
    });
  }

  template <class Call>
  void call(Call&& call) {
    check_open();
    std::shared_ptr<hsgd_comm> comm = comm_;
    call_core([&](hsgd_error* error) {
      const int status = call(comm.get(), error);
      comm.reset();
      return status;
    });
    forget_done();
  }

  // Finishes all open requests, even if others share the communicator; then the arrays are
  // released.
  void release() {
    std::shared_ptr<hsgd_comm> comm = std::move(comm_);
    const std::vector<std::shared_ptr<Submitted>> open(open_.begin(), open_.end());
    const ReleasedGil released;
    for (const auto& each : open) hsgd_request_wait(each->request, -1, nullptr);
    comm.reset();
  }

  // Releases the arrays of finished requests. That may run any Python code, including methods of
  // this communicator.
  void forget_done() {
    while (!open_.empty() && open_.front()->done()) {
      const std::shared_ptr<Submitted> done = std::move(open_.front());
      open_.pop_front();
    }
  }

  std::deque<std::shared_ptr<Submitted>> open_;  // submitted, and perhaps done; in order
  std::shared_ptr<hsgd_comm> comm_;
  hsgd_topology topology_{};
};

}  // namespace

void bind_comm(nb::module_& module) {
  nb::exception<OnDevice>(module, "OnDevice", PyExc_ValueError);
  nb::class_<Comm> comm(module, "Comm");
  def_collectives(comm);
  def_group_calls(comm);
  comm.def_static("local", &Comm::local, nb::arg("path"), nb::arg("rank"), nb::arg("size"),
                  nb::arg("options"))
      .def_static("over_tcp", &Comm::over_tcp, nb::arg("path"), nb::arg("node_of_rank"),
                  nb::arg("nic_of_rank"), nb::arg("rank"), nb::arg("leader").none(),
                  nb::arg("options"))
      .def("allocate", &Comm::allocate, nb::arg("dtype"), nb::arg("shape"),
           nb::arg("once_per_node"), nb::arg("name").none())
      .def("split", &Comm::split, nb::arg("color"), nb::arg("key"), nb::arg("rank_names").none())
      .def("shrink", &Comm::shrink, nb::arg("timeout_s"))
      .def(
          "window",
          [](Comm& self, const WindowOptions& options) { return self.window(options, nullptr, 0); },
          nb::arg("options"))
      .def("abort", &Comm::call<hsgd_comm_abort>)
      .def("expire", &Comm::expire)
      .def("request_stop", &Comm::call<hsgd_comm_request_stop>)
      .def("stop_requested", &Comm::stop_requested)
      .def("explain_leaving", &Comm::explain_leaving, nb::arg("words"))
      .def("leave", &Comm::call<hsgd_comm_leave>)
      .def("close", &Comm::close)
      .def("closed", &Comm::closed)
      .def("has_open", &Comm::has_open)
      .def("topology", &Comm::topology, nb::rv_policy::copy)
      .def("nodes", &Comm::nodes)
      .def("rank_names", &Comm::rank_names)
      .def("tell_hosts", &Comm::tell_hosts, nb::arg("hosts"))
      .def("descriptor", &Comm::descriptor)
      .def("shared_address", &Comm::shared_address)
      .def("counters", &Comm::counters)
      .def("keep_records", &Comm::keep_records, nb::arg("capacity"))
      .def("take_records", &Comm::take_records);

  nb::class_<Leader>(module, "Leader")
      .def(nb::init<const std::string&, int>(), nb::arg("interfaces"), nb::arg("nodes"))
      .def("address", &Leader::address)
      .def("connect", &Leader::connect, nb::arg("addresses"), nb::arg("ranks"), nb::arg("node"),
           nb::arg("options"));
  module.def(
      "near_nic", [](const Options& options) { return hsgd_near_nic(&options); },
      nb::arg("options"));
  module.def(
      "leaders",
      [](const std::vector<int>& node_of_rank, const std::vector<int>& nic_of_rank) {
        return without_gil([&] { return checked_leaders({node_of_rank, nic_of_rank}); });
      },
      nb::arg("node_of_rank"), nb::arg("nic_of_rank"));

  nb::class_<Request>(module, "Request")
      .def("done", &Request::done)
      .def("wait", &Request::wait, nb::arg("timeout_s"))
      .def("result", &Request::result);

  nb::class_<MpiLibrary>(module, "MpiLibrary")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("version", &MpiLibrary::version)
      .def(
          "create",
          [](const MpiLibrary& self, uintptr_t address, const Options& options) {
            return Comm(self.create(address, options));
          },
          nb::arg("address"), nb::arg("options"))
      .def(
          "window",
          [](const MpiLibrary& self, uintptr_t address, Comm& comm, const WindowOptions& options) {
            return comm.window(options, &self, address);
          },
          nb::arg("address"), nb::arg("comm"), nb::arg("options"));
}

}  // namespace hsgd::python
