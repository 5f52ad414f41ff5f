// Array: reads arrays of NumPy, of torch, and of any library with the buffer protocol or DLPack.
#include "bindings/arrays/array.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

namespace hsgd::python {

namespace {

using Family = nb::dlpack::dtype_code;
constexpr const char* kDeviceInterface = "__cuda_array_interface__";
// The families of dtypes: a dtype's name is its family and the bits of an element.
constexpr const char* kFamilies[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
constexpr size_t kFamilyCount = std::size(kFamilies);
static_assert(static_cast<int>(Family::Bfloat) == 4 && static_cast<int>(Family::Bool) == 6);
constexpr auto kOther = static_cast<Family>(3);

std::string name_of(Family family, size_t bits) {
  const std::string name = kFamilies[static_cast<size_t>(family)];
  return family == Family::Bool ? name : name + std::to_string(bits);
}

// Finds the dtypes of the core by family and width.
class Dtypes {
 public:
  Dtypes() {
    std::fill_n(&found_[0][0], kFamilyCount * kWidths, HSGD_DTYPE_COUNT);
    for (int code = 0; code < HSGD_DTYPE_COUNT; ++code) {
      const auto dtype = static_cast<hsgd_dtype>(code);
      const std::string name = hsgd_dtype_name(dtype);
      const size_t bits = 8 * hsgd_dtype_bytes(dtype);
      for (size_t family = 0; family < kFamilyCount; ++family) {
        if (name == name_of(static_cast<Family>(family), bits)) found_[family][width(bits)] = dtype;
      }
      names_ += (code == 0 ? "" : code + 1 < HSGD_DTYPE_COUNT ? ", " : " and ") + name;
    }
  }

  // Returns the dtype, or HSGD_DTYPE_COUNT if the core has none.
  hsgd_dtype find(Family family, size_t bits) const {
    const auto row = static_cast<size_t>(family);
    return row < kFamilyCount && width(bits) < kWidths ? found_[row][width(bits)]
                                                       : HSGD_DTYPE_COUNT;
  }
  const std::string& names() const { return names_; }

 private:
  static constexpr size_t kWidths = 4;
  static size_t width(size_t bits) {
    return bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : bits == 64 ? 3 : kWidths;
  }

  hsgd_dtype found_[kFamilyCount][kWidths];
  std::string names_;
};

const Dtypes& dtypes() {
  static const Dtypes table;
  return table;
}

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(object.type().attr("__name__"));
}

[[noreturn]] void refuse_dtype(const char* what, const std::string& dtype) {
  throw nb::type_error(
      (std::string(what) + ": dtype " + dtype + " is not supported; use one of " + dtypes().names())
          .c_str());
}

[[noreturn]] void refuse_layout(const char* what) {
  throw nb::value_error(
      (std::string(what) +
       ": the array is not C-contiguous; pass numpy.ascontiguousarray(x) or tensor.contiguous()")
          .c_str());
}

std::string elsewhere(const char* what, const std::string& device) {
  return std::string(what) + ": the array is on " + device + "; move it to the CPU first";
}

[[noreturn]] void refuse_device(const char* what, const std::string& device) {
  throw OnDevice(elsewhere(what, device));
}

// Returns true if the array is in device memory. The buffer protocol does not decide: CuPy's arrays
// in memory that the CPU can read have it, and count as device arrays. Arrays of Numba that
// subclass numpy.ndarray count as host arrays.
bool lies_on_device(nb::handle object) {
  if (std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") == 0)
    return false;  // nearly all
  return nb::hasattr(object, kDeviceInterface) &&
         !nb::isinstance(object, nb::module_::import_("numpy").attr("ndarray"));
}

Family family_of_format(char code) {
  if (std::strchr("efd", code) != nullptr) return Family::Float;
  if (std::strchr("bhilq", code) != nullptr) return Family::Int;
  if (std::strchr("BHILQ", code) != nullptr) return Family::UInt;
  return code == '?' ? Family::Bool : kOther;
}

// Returns NumPy's name of a dtype that hsgd does not support, given its buffer format without a
// byte order.
std::string name_of_format(const std::string& code, size_t bits) {
  if (code == "g") return "longdouble";
  if (code.size() == 2 && code[0] == 'Z') return name_of(Family::Complex, bits);
  const Family family = code.size() == 1 ? family_of_format(code[0]) : kOther;
  return family == kOther ? "'" + code + "' (buffer format)" : name_of(family, bits);
}

hsgd_dtype dtype_of_format(const char* format, size_t itemsize, const char* what) {
  const char* code = format == nullptr ? "B" : format;
  if (*code == '>' || *code == '!') refuse_dtype(what, std::string("'") + code + "' (big-endian)");
  if (*code == '<' || *code == '=' || *code == '@') ++code;
  if (code[0] != '\0' && code[1] == '\0') {
    const hsgd_dtype dtype = dtypes().find(family_of_format(*code), 8 * itemsize);
    if (dtype != HSGD_DTYPE_COUNT) return dtype;
  }
  refuse_dtype(what, name_of_format(code, 8 * itemsize));
}

hsgd_dtype dtype_of_dlpack(nb::dlpack::dtype dtype, const char* what) {
  const auto family = static_cast<Family>(dtype.code);
  if (dtype.lanes == 1) {
    const hsgd_dtype found = dtypes().find(family, dtype.bits);
    if (found != HSGD_DTYPE_COUNT) return found;
  }
  if (dtype.code < kFamilyCount && family != kOther)
    refuse_dtype(what, name_of(family, dtype.bits));
  refuse_dtype(what, "with DLPack code " + std::to_string(dtype.code) + " and " +
                         std::to_string(dtype.bits) + " bits");
}

}  // namespace

Array::Array(nb::handle object, const char* what, bool writable) {
  const TorchNames* torch = TorchNames::of(object.ptr());
  if (torch != nullptr && take_tensor(object, *torch)) return;
  if (PyObject_CheckBuffer(object.ptr()) != 0 && !lies_on_device(object)) {
    take_buffer(object, what, writable);
  } else {
    take_dlpack(object, what);
  }
}

Array::Array(nb::handle object) {
  const TorchNames* torch = TorchNames::of(object.ptr());
  const bool is_taken = torch != nullptr && take_tensor(object, *torch);
  extents_[0] = static_cast<int64_t>(count_);
  shape_ = extents_;
  ndim_ = is_taken ? 1 : -1;
}

Array::~Array() {
  if (holds_buffer_) PyBuffer_Release(&buffer_);
}

void Array::take_buffer(nb::handle object, const char* what, bool writable) {
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    // NumPy types without a buffer format (ml_dtypes' bfloat16) and the like.
    PyErr_Clear();
    throw nb::type_error((std::string(what) + ": this " + class_name(object) +
                          " cannot be read through the buffer protocol; " +
                          "supported dtypes are " + dtypes().names())
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

// Reads a dense tensor in CPU memory with a dtype of the core, as nearly all are: DLPack takes ten
// times as long. Returns false for anything else, also a tensor without memory; then take_dlpack()
// reports the reason.
bool Array::take_tensor(nb::handle object, const TorchNames& torch) {
  PyObject* tensor = object.ptr();
  const auto get = [tensor](PyObject* name) { return nb::steal(PyObject_GetAttr(tensor, name)); };
  const auto call = [tensor](PyObject* name) {
    return nb::steal(PyObject_CallMethodNoArgs(tensor, name));
  };
  dtype_ = torch.dtype_of(get(torch.dtype).ptr());
  const bool is_dense = dtype_ != HSGD_DTYPE_COUNT && get(torch.layout).is(torch.strided) &&
                        get(torch.is_cpu).is(Py_True) && call(torch.is_contiguous).is(Py_True) &&
                        call(torch.is_neg).is(Py_False);
  const nb::object shape = is_dense ? get(torch.shape) : nb::object();
  const nb::object address = shape.is_valid() ? call(torch.data_ptr) : nb::object();
  if (!address.is_valid() || PyTuple_GET_SIZE(shape.ptr()) > kMostDimensions) {
    PyErr_Clear();  // the error of a nested tensor, or one without memory
    return false;
  }
  ndim_ = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  count_ = 1;
  for (int i = 0; i < ndim_; ++i) {
    extents_[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    count_ *= static_cast<uint64_t>(extents_[i]);
  }
  data_ = PyLong_AsVoidPtr(address.ptr());
  shape_ = extents_;
  tensor_ = nb::borrow(object);
  return data_ != nullptr || count_ == 0;
}

void Array::take_dlpack(nb::handle object, const char* what) {
  if (nb::hasattr(object, kDeviceInterface)) refuse_device(what, "a CUDA device");
  if (!nb::hasattr(object, "__dlpack__")) {
    throw nb::type_error(
        (std::string(what) + ": " + class_name(object) +
         " is not an array; pass a NumPy array, a CPU torch tensor, or anything with the buffer "
         "protocol or DLPack")
            .c_str());
  }
  // A tensor that requires grad refuses DLPack; its data is used instead.
  const nb::object plain =
      nb::hasattr(object, "detach") ? object.attr("detach")() : nb::borrow(object);
  if (nb::hasattr(plain, "device") && nb::hasattr(plain.attr("device"), "type")) {
    const nb::object device = plain.attr("device");
    const auto type = nb::cast<std::string>(nb::str(device.attr("type")));
    const auto name = nb::cast<std::string>(nb::str(device));
    if (type == "cuda") refuse_device(what, name);
    if (type != "cpu") throw nb::value_error(elsewhere(what, name).c_str());
  }
  if (nb::hasattr(plain, "is_neg") && nb::cast<bool>(plain.attr("is_neg")())) {
    throw nb::value_error((std::string(what) +
                           ": the tensor is a lazily negated view (its negative bit is set); " +
                           "pass tensor.resolve_neg()")
                              .c_str());
  }
  nb::ndarray<> array;
  if (!nb::try_cast(plain, array)) {
    throw nb::type_error((std::string(what) + ": this " + class_name(object) +
                          " cannot be used through DLPack; " +
                          "supported are dense CPU arrays of " + dtypes().names())
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

}  // namespace hsgd::python
