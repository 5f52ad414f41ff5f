// The Python binding: checks dtype, contiguity and shape, releases the GIL, calls once. No logic.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "binding/array.hpp"
#include "binding/box.hpp"
#include "binding/collective_call.hpp"
#include "binding/gil.hpp"
#include "binding/lars.hpp"
#include "binding/tree.hpp"
#include "binding/weight_drift.hpp"
#include "binding/window.hpp"
#include "hsgd_core.h"
#include "hsgd_mpi.h"

namespace nb = nanobind;

namespace hsgd::python {

// --- arrays ---

namespace {

constexpr const char* kSupported =
    "float32, float64, float16, bfloat16, int8, int32, int64 and uint8";

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(object.type().attr("__name__"));
}

[[noreturn]] void refuse_dtype(const char* what, const std::string& dtype) {
  throw nb::type_error(
      (std::string(what) + ": dtype " + dtype + " is not supported; use one of " + kSupported)
          .c_str());
}

[[noreturn]] void refuse_layout(const char* what) {
  throw nb::value_error(
      (std::string(what) +
       ": the array is not C-contiguous; pass numpy.ascontiguousarray(x) or tensor.contiguous()")
          .c_str());
}

// NumPy's name of a dtype that hsgd does not take, given its buffer format without a byte order.
std::string name_of_format(const std::string& code, size_t itemsize) {
  const std::string bits = std::to_string(8 * itemsize);
  if (code == "?") return "bool";
  if (code == "g") return "longdouble";
  if (code.size() == 1 && std::strchr("hilq", code[0]) != nullptr) return "int" + bits;
  if (code.size() == 1 && std::strchr("HILQ", code[0]) != nullptr) return "uint" + bits;
  if (code.size() == 2 && code[0] == 'Z') return "complex" + bits;
  return "'" + code + "' (buffer format)";
}

hsgd_dtype dtype_of_format(const char* format, size_t itemsize, const char* what) {
  const char* code = format == nullptr ? "B" : format;
  if (*code == '>' || *code == '!') refuse_dtype(what, std::string("'") + code + "' (big-endian)");
  if (*code == '<' || *code == '=' || *code == '@') ++code;
  if (code[0] != '\0' && code[1] == '\0') {
    switch (*code) {
      case 'f':
        return HSGD_FLOAT32;
      case 'd':
        return HSGD_FLOAT64;
      case 'e':
        return HSGD_FLOAT16;
      case 'b':
        return HSGD_INT8;
      case 'B':
        return HSGD_UINT8;
      case 'i':
      case 'l':
      case 'q':
        if (itemsize == 4) return HSGD_INT32;
        if (itemsize == 8) return HSGD_INT64;
        break;
      default:
        break;
    }
  }
  refuse_dtype(what, name_of_format(code, itemsize));
}

hsgd_dtype dtype_of_dlpack(nb::dlpack::dtype dtype, const char* what) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.lanes == 1) {
    if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32) return HSGD_FLOAT32;
    if (code == nb::dlpack::dtype_code::Float && dtype.bits == 64) return HSGD_FLOAT64;
    if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16) return HSGD_FLOAT16;
    if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return HSGD_BFLOAT16;
    if (code == nb::dlpack::dtype_code::Int && dtype.bits == 8) return HSGD_INT8;
    if (code == nb::dlpack::dtype_code::Int && dtype.bits == 32) return HSGD_INT32;
    if (code == nb::dlpack::dtype_code::Int && dtype.bits == 64) return HSGD_INT64;
    if (code == nb::dlpack::dtype_code::UInt && dtype.bits == 8) return HSGD_UINT8;
  }
  const std::string bits = std::to_string(dtype.bits);
  if (code == nb::dlpack::dtype_code::Bool) refuse_dtype(what, "bool");
  if (code == nb::dlpack::dtype_code::Int) refuse_dtype(what, "int" + bits);
  if (code == nb::dlpack::dtype_code::UInt) refuse_dtype(what, "uint" + bits);
  if (code == nb::dlpack::dtype_code::Complex) refuse_dtype(what, "complex" + bits);
  refuse_dtype(what, "with DLPack code " + std::to_string(dtype.code) + " and " + bits + " bits");
}

}  // namespace

Array::Array(nb::handle object, const char* what, bool writable) {
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    take_buffer(object, what, writable);
  } else {
    take_dlpack(object, what);
  }
}

Array::~Array() {
  if (holds_buffer_) PyBuffer_Release(&buffer_);
}

void Array::take_buffer(nb::handle object, const char* what, bool writable) {
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    // NumPy types without a buffer format (ml_dtypes' bfloat16) and the like.
    PyErr_Clear();
    throw nb::type_error((std::string(what) + ": this " + class_name(object) +
                          " does not give its memory away; " + "supported dtypes are " + kSupported)
                             .c_str());
  }
  holds_buffer_ = true;
  try {
    if (writable && buffer_.readonly != 0) {
      throw nb::value_error(
          (std::string(what) + ": the array is read-only; pass a writable one").c_str());
    }
    if (PyBuffer_IsContiguous(&buffer_, 'C') == 0) refuse_layout(what);
    dtype_ = dtype_of_format(buffer_.format, static_cast<size_t>(buffer_.itemsize), what);
  } catch (...) {
    PyBuffer_Release(&buffer_);
    holds_buffer_ = false;
    throw;
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "shapes are passed on as they are");
  data_ = buffer_.buf;
  ndim_ = buffer_.ndim;
  shape_ = reinterpret_cast<const int64_t*>(buffer_.shape);
  for (int i = 0; i < ndim_; ++i) count_ *= static_cast<uint64_t>(shape_[i]);
}

void Array::take_dlpack(nb::handle object, const char* what) {
  if (!nb::hasattr(object, "__dlpack__")) {
    throw nb::type_error(
        (std::string(what) + ": " + class_name(object) +
         " is no array; pass a NumPy array, a CPU torch tensor, or anything with the buffer "
         "protocol or DLPack")
            .c_str());
  }
  // A tensor that requires grad refuses DLPack; its data is what is meant.
  const nb::object plain =
      nb::hasattr(object, "detach") ? object.attr("detach")() : nb::borrow(object);
  if (nb::hasattr(plain, "device") && nb::hasattr(plain.attr("device"), "type") &&
      nb::cast<std::string>(nb::str(plain.attr("device").attr("type"))) != "cpu") {
    throw nb::value_error((std::string(what) + ": the tensor is on " +
                           nb::cast<std::string>(nb::str(nb::object(plain.attr("device")))) +
                           "; move it to the CPU first")
                              .c_str());
  }
  if (nb::hasattr(plain, "is_neg") && nb::cast<bool>(plain.attr("is_neg")())) {
    throw nb::value_error((std::string(what) +
                           ": the tensor is a negated view, whose memory has the other sign; " +
                           "pass tensor.resolve_neg()")
                              .c_str());
  }
  nb::ndarray<> array;
  if (!nb::try_cast(plain, array)) {
    throw nb::type_error((std::string(what) + ": this " + class_name(object) +
                          " cannot be used through DLPack; " +
                          "supported are dense CPU arrays of " + kSupported)
                             .c_str());
  }
  dtype_ = dtype_of_dlpack(array.dtype(), what);
  count_ = array.size();
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0 && count_ > 0;) {  // an empty array has any strides
    if (array.shape(i) > 1 && array.stride(i) != expected) refuse_layout(what);
    expected *= static_cast<int64_t>(array.shape(i));
  }
  data_ = array.data();
  ndim_ = static_cast<int>(array.ndim());
  shape_ = array.shape_ptr();
  dlpack_ = std::move(array);
}

bool Array::is_like(const Array& other) const {
  return dtype_ == other.dtype_ && ndim_ == other.ndim_ &&
         std::equal(shape_, shape_ + ndim_, other.shape_);
}

uint64_t Array::row_elements() const {
  uint64_t elements = 1;
  for (int i = 1; i < ndim_; ++i) elements *= static_cast<uint64_t>(shape_[i]);
  return elements;
}

bool Array::joins(const Array& other) const {
  const int more = std::max(ndim_, 1) - 1;
  return dtype_ == other.dtype_ && more == std::max(other.ndim_, 1) - 1 &&
         (more == 0 || std::equal(shape_ + 1, shape_ + ndim_, other.shape_ + 1));
}

// --- errors ---

namespace {

const char* class_of(int code) {
  switch (code) {
    case HSGD_ERR_PEER_LOST:
      return "PeerLost";
    case HSGD_ERR_TIMEOUT:
      return "CollectiveTimeout";
    case HSGD_ERR_SIGNATURE:
      return "SignatureMismatch";
    case HSGD_ERR_MEMORY:
      return "SharedMemoryError";
    case HSGD_ERR_QUEUE_FULL:
      return "QueueFull";
    default:
      return "HsgdError";
  }
}

// Text may be cut within a character.
nb::object decoded(const char* text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace"));
}

nb::object name_of(const hsgd_side& side) {
  return side.named != 0 ? decoded(side.name) : nb::object(nb::none());
}

}  // namespace

void raise_on_error(int status, const hsgd_error& error) {
  if (status == HSGD_OK) return;
  const nb::object message = decoded(error.message);
  if (status == HSGD_ERR_INTERRUPTED && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (status == HSGD_ERR_ARGUMENT) {
    PyErr_SetObject(PyExc_ValueError, message.ptr());
    throw nb::python_error();
  }
  const nb::object type = nb::module_::import_("hsgd.errors").attr(class_of(status));
  const nb::object exception = type(message);
  exception.attr("rank") = error.rank;
  if (status == HSGD_ERR_SIGNATURE) {
    const auto& [one, other] = error.sides;
    exception.attr("ranks") = nb::make_tuple(one.rank, other.rank);
    exception.attr("names") = nb::make_tuple(name_of(one), name_of(other));
  }
  PyErr_SetObject(type.ptr(), exception.ptr());
  throw nb::python_error();
}

// --- the MPI part, loaded when it is asked for ---

namespace {

class MpiLibrary {
 public:
  explicit MpiLibrary(const std::string& path)
      : handle_(::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    if (handle_ == nullptr) {
      const std::string reason = ::dlerror();
      const nb::object type = nb::module_::import_("hsgd.errors").attr("LaunchError");
      PyErr_SetObject(type.ptr(),
                      nb::str(("hsgd's MPI part cannot be loaded: " + reason).c_str()).ptr());
      throw nb::python_error();
    }
    create_ = reinterpret_cast<decltype(create_)>(::dlsym(handle_, "hsgd_mpi_comm_create"));
    version_ = reinterpret_cast<decltype(version_)>(::dlsym(handle_, "hsgd_mpi_library_version"));
    window_ = reinterpret_cast<decltype(window_)>(::dlsym(handle_, "hsgd_mpi_window_create"));
  }
  // Never unloaded: MPI keeps callbacks into it until the process ends.

  std::string version() const {
    char text[256] = {};
    version_(text, sizeof text);
    return text;
  }

  hsgd_comm* create(uintptr_t address, const hsgd_options& options) const {
    hsgd_comm* comm = nullptr;
    hsgd_error error{};
    int status = 0;
    {
      const ReleasedGil released;
      status = create_(reinterpret_cast<const void*>(address), &options, &comm, &error);
    }
    raise_on_error(status, error);
    return comm;
  }

  // In the form of hsgd_window_create.
  auto window(uintptr_t address) const {
    return [this, address](hsgd_comm* comm, const hsgd_window_options* options, hsgd_window** made,
                           hsgd_error* error) {
      return window_(reinterpret_cast<const void*>(address), comm, options, made, error);
    };
  }

 private:
  void* handle_;
  decltype(&hsgd_mpi_comm_create) create_;
  decltype(&hsgd_mpi_library_version) version_;
  decltype(&hsgd_mpi_window_create) window_;
};

// --- communicators ---

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

  static Comm local(const std::string& path, int rank, int size, const hsgd_options& options) {
    hsgd_comm* comm = nullptr;
    hsgd_error error{};
    int status = 0;
    {
      const ReleasedGil released;
      status = hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, &error);
    }
    raise_on_error(status, error);
    return Comm(comm);
  }

  // `fill` describes the collective; see Collective.
  template <class Fill>
  nb::object run(Fill&& fill) {
    Collective collective(topology_);
    fill(collective);
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_run(comm, &collective.call(), error);
    });
    return collective.result();
  }

  template <class Fill>
  Request start(Fill&& fill) {
    const auto submitted = std::make_shared<Submitted>(topology_);
    fill(submitted->collective);
    forget_done();
    check_open();
    hsgd_error error;
    const int status =
        hsgd_comm_start(comm_.get(), &submitted->collective.call(), &submitted->request, &error);
    raise_on_error(status, error);
    open_.push_back(submitted);
    return Request(submitted);
  }

  // The bytes of a shared buffer, which lives as long as the array and all that is made of it.
  nb::object allocate(int dtype, const std::vector<int64_t>& shape, bool once_per_node,
                      nb::handle name) {
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

  std::optional<Comm> split(int color, int key) {
    hsgd_comm* part = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_split(comm, color, key, &part, error);
    });
    if (part == nullptr) return std::nullopt;
    return Comm(part);
  }

  // `create`: hsgd_window_create, or what has its form.
  template <class Create>
  NotifiedWindow window(Create&& create, const hsgd_window_options& options) {
    hsgd_window* made = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) { return create(comm, &options, &made, error); });
    return NotifiedWindow(comm_, made);
  }

  // The old one stays as it is: closing it is the caller's.
  Comm shrink(double timeout_s) {
    hsgd_comm* shrunk = nullptr;
    call([&](hsgd_comm* comm, hsgd_error* error) {
      return hsgd_comm_shrink(comm, timeout_s, &shrunk, error);
    });
    return Comm(shrunk);
  }

  // A collective of another thread keeps the communicator until it ends.
  void close() {
    release();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();  // Ctrl-C ended the wait
    forget_done();
  }

  void leave() const {
    if (comm_ != nullptr) hsgd_comm_leave(comm_.get());
  }

  void keep_records(uint64_t capacity) const {
    check_open();
    hsgd_comm_keep_records(comm_.get(), capacity);
  }

  // Of each: name, bytes, and begin, end and busy time of the call and of each level.
  nb::list take_records() const {
    check_open();
    constexpr uint64_t kAtOnce = 32;
    hsgd_record records[kAtOnce];
    nb::list taken;
    for (;;) {
      const uint64_t count = hsgd_comm_take_records(comm_.get(), records, kAtOnce);
      for (const hsgd_record* record = records; record < records + count; ++record) {
        nb::list spans;
        for (const hsgd_span* span :
             {&record->call, &record->reduce, &record->inter, &record->gather}) {
          spans.append(nb::make_tuple(span->begin_ns, span->end_ns, span->busy_ns));
        }
        taken.append(nb::make_tuple(decoded(record->name), record->bytes, spans));
      }
      if (count < kAtOnce) return taken;
    }
  }

  bool closed() const { return comm_ == nullptr; }
  // Whether close() would wait for requests.
  bool has_open() {
    forget_done();
    return !open_.empty();
  }
  const hsgd_topology& topology() const { return topology_; }
  std::vector<int> nodes() const {
    check_open();
    std::vector<int> nodes;
    for (int rank = 0; rank < topology_.size; ++rank)
      nodes.push_back(hsgd_comm_node_of(comm_.get(), rank));
    return nodes;
  }

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
    if (comm_ != nullptr) return;
    hsgd_error error{};
    std::snprintf(error.message, sizeof error.message, "this communicator is closed");
    raise_on_error(HSGD_ERR_CLOSED, error);
  }

  template <class Call>
  void call(Call&& call) {
    check_open();
    hsgd_error error;
    int status = 0;
    std::shared_ptr<hsgd_comm> comm = comm_;
    {
      const ReleasedGil released;
      status = call(comm.get(), &error);
      comm.reset();
    }
    raise_on_error(status, error);
    forget_done();
  }

  // Finishes what is open.
  void release() {
    std::shared_ptr<hsgd_comm> comm = std::move(comm_);
    const ReleasedGil released;
    comm.reset();
  }

  // Giving arrays back may run any Python code, this communicator's methods included.
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

// The two methods of one kind of collective, with the arguments of the function that fills it in.
template <class... Arguments>
auto blocking(void (Collective::*fill)(Arguments...)) {
  return [fill](Comm& self, Arguments... arguments) {
    return self.run([&](Collective& collective) { (collective.*fill)(arguments...); });
  };
}

template <class... Arguments>
auto starting(void (Collective::*fill)(Arguments...)) {
  return [fill](Comm& self, Arguments... arguments) {
    return self.start([&](Collective& collective) { (collective.*fill)(arguments...); });
  };
}

hsgd_options default_options() {
  hsgd_options options;
  hsgd_options_default(&options);
  options.interrupted = python_interrupted;
  return options;
}

}  // namespace
}  // namespace hsgd::python

NB_MODULE(_native, module) {
  using hsgd::python::blocking;
  using hsgd::python::Collective;
  using hsgd::python::Comm;
  using hsgd::python::MpiLibrary;
  using hsgd::python::Request;
  using hsgd::python::starting;

  nb::class_<hsgd_options>(module, "Options")
      .def("__init__",
           [](hsgd_options* self) { new (self) hsgd_options(hsgd::python::default_options()); })
      .def_rw("nontemporal", &hsgd_options::nontemporal)
      .def_rw("timeout_s", &hsgd_options::timeout_s)
      .def_rw("oneshot_bytes", &hsgd_options::oneshot_bytes)
      .def_rw("chunk_bytes", &hsgd_options::chunk_bytes)
      .def_rw("wire_oneshot_bytes", &hsgd_options::wire_oneshot_bytes)
      .def_rw("wire_dtype", &hsgd_options::wire_dtype)
      .def_rw("wire_chunk_bytes", &hsgd_options::wire_chunk_bytes)
      .def_rw("slots", &hsgd_options::slots)
      .def_rw("spin", &hsgd_options::spin)
      .def_rw("min_bytes", &hsgd_options::min_bytes)
      .def_rw("report", &hsgd_options::report);

  nb::class_<hsgd_counters>(module, "Counters")
      .def_ro("calls", &hsgd_counters::calls)
      .def_ro("payload_bytes", &hsgd_counters::payload_bytes)
      .def_ro("intra_bytes", &hsgd_counters::intra_bytes)
      .def_ro("inter_bytes_sent", &hsgd_counters::inter_bytes_sent)
      .def_ro("inter_bytes_received", &hsgd_counters::inter_bytes_received)
      .def_ro("wait_ns", &hsgd_counters::wait_ns)
      .def_ro("total_ns", &hsgd_counters::total_ns);

  nb::class_<hsgd_topology>(module, "Topology")
      .def_ro("rank", &hsgd_topology::rank)
      .def_ro("size", &hsgd_topology::size)
      .def_ro("local_rank", &hsgd_topology::local_rank)
      .def_ro("local_size", &hsgd_topology::local_size)
      .def_ro("node_rank", &hsgd_topology::node_rank)
      .def_ro("node_count", &hsgd_topology::node_count)
      .def_ro("leaders", &hsgd_topology::leaders)
      .def_ro("nontemporal", &hsgd_topology::nontemporal)
      .def_ro("oneshot_bytes", &hsgd_topology::oneshot_bytes)
      .def_ro("chunk_bytes", &hsgd_topology::chunk_bytes);

  nb::class_<Comm> comm(module, "Comm");
  // One kind of collective: NAME, which blocks, and NAME_async, which gives a Request.
  const auto def_collective = [&](const std::string& name, auto fill, const auto&... arguments) {
    comm.def(name.c_str(), blocking(fill), arguments...);
    comm.def((name + "_async").c_str(), starting(fill), arguments...);
  };
  def_collective("allreduce", &Collective::allreduce, nb::arg("source").none(),
                 nb::arg("out").none(), nb::arg("op"), nb::arg("name").none());
  def_collective("broadcast", &Collective::broadcast, nb::arg("data").none(), nb::arg("root"),
                 nb::arg("name").none());
  def_collective("barrier", &Collective::barrier);
  def_collective("reduce_scatter", &Collective::reduce_scatter, nb::arg("source").none(),
                 nb::arg("out").none(), nb::arg("op"), nb::arg("counts").none(),
                 nb::arg("name").none());
  def_collective("allgather", &Collective::allgather, nb::arg("source").none(),
                 nb::arg("out").none(), nb::arg("name").none());
  def_collective("alltoall", &Collective::alltoall, nb::arg("source").none(), nb::arg("out").none(),
                 nb::arg("name").none());
  def_collective("alltoall_rows", &Collective::alltoall_rows, nb::arg("source").none(),
                 nb::arg("counts"), nb::arg("out").none(), nb::arg("name").none());
  comm.def_static("local", &Comm::local)
      .def("allocate", &Comm::allocate, nb::arg("dtype"), nb::arg("shape"),
           nb::arg("once_per_node"), nb::arg("name").none())
      .def("split", &Comm::split)
      .def("shrink", &Comm::shrink, nb::arg("timeout_s"))
      .def("window",
           [](Comm& self, const hsgd_window_options& options) {
             return self.window(hsgd_window_create, options);
           })
      .def("leave", &Comm::leave)
      .def("close", &Comm::close)
      .def("closed", &Comm::closed)
      .def("has_open", &Comm::has_open)
      .def("topology", &Comm::topology, nb::rv_policy::copy)
      .def("nodes", &Comm::nodes)
      .def("counters", &Comm::counters)
      .def("keep_records", &Comm::keep_records, nb::arg("capacity"))
      .def("take_records", &Comm::take_records);

  nb::class_<Request>(module, "Request")
      .def("done", &Request::done)
      .def("wait", &Request::wait)
      .def("result", &Request::result);

  nb::class_<MpiLibrary>(module, "MpiLibrary")
      .def(nb::init<const std::string&>())
      .def("version", &MpiLibrary::version)
      .def("create",
           [](const MpiLibrary& self, uintptr_t address, const hsgd_options& options) {
             return Comm(self.create(address, options));
           })
      .def("window", [](const MpiLibrary& self, uintptr_t address, Comm& comm,
                        const hsgd_window_options& options) {
        return comm.window(self.window(address), options);
      });

  hsgd::python::bind_box(module);
  hsgd::python::bind_tree(module);
  hsgd::python::bind_window(module);
  hsgd::python::bind_lars(module);
  hsgd::python::bind_change(module);
  // Addresses: the caller has checked the arrays, and keeps them.
  module.def(
      "stream_copy",
      [](uintptr_t to, uintptr_t from, uint64_t bytes) {
        hsgd_stream_copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
      },
      nb::arg("to"), nb::arg("from_"), nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "average",
      [](const std::vector<uintptr_t>& inputs, uintptr_t out, uint64_t count, int dtype) {
        std::vector<const void*> in(inputs.size());
        std::transform(inputs.begin(), inputs.end(), in.begin(),
                       [](uintptr_t address) { return reinterpret_cast<const void*>(address); });
        hsgd_error error{};
        int status = HSGD_OK;
        {
          const hsgd::python::ReleasedGil released;
          status = hsgd_reduce(in.data(), static_cast<int>(in.size()), reinterpret_cast<void*>(out),
                               count, static_cast<hsgd_dtype>(dtype), HSGD_MEAN, &error);
        }
        hsgd::python::raise_on_error(status, error);
      },
      nb::arg("inputs"), nb::arg("out"), nb::arg("count"), nb::arg("dtype"));
  module.def("simd_name", [] { return std::string(hsgd_simd_name()); });
  module.def("abi_version", &hsgd_abi_version);
  module.def("usable_cores", &hsgd_usable_cores);
  module.def("memory_limit_bytes", [] {
    const uint64_t limit = hsgd_memory_limit_bytes();
    return limit == UINT64_MAX ? std::nullopt : std::optional<uint64_t>(limit);
  });
}
