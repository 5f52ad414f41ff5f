// Arrays of NumPy, of torch, and of whatever gives its memory by the buffer protocol or DLPack.
#include "binding/array.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace hsgd::python {

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

}  // namespace hsgd::python
