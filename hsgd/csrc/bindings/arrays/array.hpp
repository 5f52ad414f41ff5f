// Array: address, dtype and shape of a Python array. Part of the binding, not of the core.
//
// Checks an array before anything is sent: CPU memory, C-contiguous, native byte order, supported
// dtype, writable if needed. Reads NumPy, torch's plain tensors and anything with the buffer
// protocol directly, others by DLPack.
#ifndef HSGD_BINDINGS_ARRAYS_ARRAY_HPP_
#define HSGD_BINDINGS_ARRAYS_ARRAY_HPP_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "bindings/arrays/torch_names.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

namespace nb = nanobind;

using Anything = nb::typed<nb::object, nb::any>;  // Any, for type checkers

// The error for an array on a CUDA device; hsgd.comm.device handles such arrays.
class OnDevice : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class Array {
 public:
  // Reads an array. Throws OnDevice, TypeError or ValueError, saying which argument (`what`) is
  // wrong and why.
  Array(nb::handle object, const char* what, bool writable);
  // Reads a plain tensor in CPU memory, as one dimension; is_taken() returns true if it is one.
  explicit Array(nb::handle object);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* data() const { return data_; }
  uint64_t count() const { return count_; }
  hsgd_dtype dtype() const { return dtype_; }
  const int64_t* shape() const { return shape_; }  // ndim() extents
  int ndim() const { return ndim_; }
  bool is_writable() const { return !holds_buffer_ || buffer_.readonly == 0; }
  bool is_like(const Array& other) const;  // same shape and dtype
  bool is_taken() const { return ndim_ >= 0; }

  // Collectives on blocks split and join arrays along the first dimension. A 0-d array is one row.
  uint64_t rows() const { return ndim_ == 0 ? 1 : static_cast<uint64_t>(shape_[0]); }
  uint64_t row_elements() const;
  bool joins(const Array& other) const;  // same dtype and shape, except for the number of rows

 private:
  void take_buffer(nb::handle object, const char* what, bool writable);
  bool take_tensor(nb::handle object, const TorchNames& torch);
  void take_dlpack(nb::handle object, const char* what);

  void* data_ = nullptr;
  uint64_t count_ = 1;
  hsgd_dtype dtype_ = HSGD_FLOAT32;
  const int64_t* shape_ = nullptr;
  int ndim_ = 0;
  Py_buffer buffer_{};
  bool holds_buffer_ = false;
  std::optional<nb::ndarray<>> dlpack_;
  nb::object tensor_;  // with its shape below
  static constexpr int kMostDimensions = 8;
  int64_t extents_[kMostDimensions];
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_ARRAYS_ARRAY_HPP_
