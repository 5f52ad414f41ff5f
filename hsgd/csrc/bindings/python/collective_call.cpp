// Collective: fills hsgd_call from Python's arguments, and waits for a request.
#include "bindings/python/collective_call.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "bindings/python/errors.hpp"

namespace hsgd::python {
namespace {

uint64_t sum_of(const Rows& rows) { return std::accumulate(rows.begin(), rows.end(), uint64_t{0}); }

void check_joins(const Array& source, const Array& target, const std::string& what) {
  if (target.joins(source)) return;
  throw nb::value_error(
      (what +
       ": out must have the dtype of the input and the same shape but for the number of rows")
          .c_str());
}

std::string wrong_rows(const std::string& what, uint64_t given, uint64_t wanted) {
  return what + ": out has " + std::to_string(given) + " rows, but the result has " +
         std::to_string(wanted) + "; pass one of that size, or None";
}

Rows even_rows(const Array& array, int size) {
  const uint64_t rows = array.ndim() == 0 ? 0 : array.rows();
  const auto ranks = static_cast<uint64_t>(size);
  Rows counts(ranks, rows / ranks);
  for (uint64_t rank = 0; rank < rows % ranks; ++rank) ++counts[rank];
  return counts;
}

// Allocates memory aligned like NumPy's arrays, with large pages if they pay off.
std::byte* new_memory(size_t bytes) {
  constexpr size_t kLine = 64;
  constexpr size_t kHugePage = 2 << 20;
  const size_t unit = bytes < 2 * kHugePage ? kLine : kHugePage;
  void* memory = std::aligned_alloc(unit, (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit);
  if (memory != nullptr && unit == kHugePage) ::madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

void refuse(hsgd_error* err, hsgd_status code, const std::string& message) {
  err->code = code;
  err->rank = -1;
  std::snprintf(err->message, sizeof err->message, "%s", message.c_str());
}

}  // namespace

void check_joined(const Array& source, const Array& target, uint64_t rows, const char* what) {
  check_joins(source, target, what);
  if (target.rows() != rows) throw nb::value_error(wrong_rows(what, target.rows(), rows).c_str());
}

Rows elements_of(const Array& array, Rows rows) {
  for (uint64_t& count : rows) count *= array.row_elements();
  return rows;
}

const char* text_of(const Name& name) {
  if (name.is_none()) return nullptr;
  if (PyUnicode_Check(name.ptr()) == 0) {
    const std::string type = nb::cast<std::string>(name.type().attr("__name__"));
    throw nb::type_error(("name is of type " + type + "; give a str, or None").c_str());
  }
  Py_ssize_t bytes = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &bytes);
  if (text == nullptr) throw nb::python_error();
  if (std::strlen(text) != static_cast<size_t>(bytes)) {
    throw nb::value_error("name has a NUL character; give one without");
  }
  return text;
}

void Collective::set_label(const Array& array, const Name& name, bool ragged) {
  label_ = {text_of(name), array.shape(), array.ndim()};
  if (ragged) {
    shape_.assign(1, -1);
    if (array.ndim() > 1)
      shape_.insert(shape_.end(), array.shape() + 1, array.shape() + array.ndim());
    label_.shape = shape_.data();
    label_.ndim = static_cast<int32_t>(shape_.size());
  }
  call_.label = &label_;
}

Rows Collective::rows_of_ranks(const Array& array, const std::optional<Rows>& given,
                               const char* what) const {
  if (array.ndim() == 0) {
    throw nb::value_error(
        (std::string(what) + ": a 0-d array has no rows to split; pass one with rows").c_str());
  }
  const Rows rows = given ? *given : even_rows(array, size());
  if (rows.size() == static_cast<size_t>(size()) && sum_of(rows) == array.rows()) return rows;
  throw nb::value_error((std::string(what) + ": " + std::to_string(rows.size()) + " counts for " +
                         std::to_string(sum_of(rows)) + " rows, but there are " +
                         std::to_string(size()) + " ranks and " + std::to_string(array.rows()) +
                         " rows; give one count per rank, which sum to the number of rows")
                            .c_str());
}

bool Collective::take_flat(std::optional<Array>& place, nb::handle tensor) {
  if (place.emplace(tensor).is_taken()) return true;
  place.reset();
  return false;
}

void Collective::take_joined(const Array& source, nb::handle out, const char* what) {
  if (out.is_none()) return;
  check_joins(source, take_out(out, (std::string(what) + ", out").c_str()), what);
}

void Collective::expect_rows(const Array& source, hsgd_kind kind, const char* what) {
  what_ = what;
  call_.kind = kind;
  call_.in = source.data();
  call_.dtype = source.dtype();
  call_.row_elements = source.row_elements();
  rows_.resize(static_cast<size_t>(topology_.size));  // place_rows() must not fail to allocate them
  row_bytes_ = source.row_elements() * hsgd_dtype_bytes(source.dtype());
  call_.context = this;
  call_.place = [](void* self, const uint64_t* rows, hsgd_error* err) {
    return static_cast<Collective*>(self)->place_rows(rows, err);
  };
}

void* Collective::place_rows(const uint64_t* rows, hsgd_error* err) {
  std::copy_n(rows, rows_.size(), rows_.begin());
  const uint64_t total = sum_of(rows_);
  if (!out_) {
    memory_.reset(new_memory(total * row_bytes_));
    if (memory_ == nullptr) {
      refuse(err, HSGD_ERR_MEMORY,
             "no memory for a result of " + std::to_string(total * row_bytes_) + " bytes");
    }
    return memory_.get();
  }
  if (out_->rows() == total) return out_->data();
  refuse(err, HSGD_ERR_ARGUMENT, wrong_rows(what_, out_->rows(), total));
  return nullptr;
}

void Collective::take_function(nb::object function) {
  function_ = std::move(function);
  call_.kind = HSGD_FUNCTION;
  call_.context = this;
  call_.function = [](void* self) { static_cast<Collective*>(self)->call_function(); };
}

void Collective::call_function() {
  take_gil([&] {
    const nb::gil_scoped_acquire acquired;
    const nb::error_scope earlier;  // an interrupted collective has set an exception
    const nb::object function = std::move(function_);  // what it refers to is freed at once
    const nb::object result = nb::steal(PyObject_CallNoArgs(function.ptr()));
    if (!result.is_valid()) PyErr_WriteUnraisable(function.ptr());
  });
}

nb::object Collective::result() {
  if (rows_.empty()) return nb::none();
  if (memory_ != nullptr) {
    std::byte* memory = memory_.release();
    const nb::capsule owner(memory, [](void* held) noexcept { std::free(held); });
    bytes_ = nb::cast(
        nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {sum_of(rows_) * row_bytes_}, owner));
  }
  return nb::make_tuple(bytes_.is_valid() ? bytes_ : nb::none(), nb::cast(rows_));
}

void Collective::give_arrays_back() {
  in_.reset();
  out_.reset();
}

bool Request::wait(double timeout_s) {
  const std::shared_ptr<Submitted> submitted = submitted_;
  hsgd_error error;
  int status = 0;
  if (submitted->done()) {  // no need to release the GIL
    status = hsgd_request_wait(submitted->request, timeout_s, &error);
  } else {
    const ReleasedGil released;
    status = hsgd_request_wait(submitted->request, timeout_s, &error);
  }
  if (status == HSGD_ERR_PENDING) return false;
  // An interrupt has set a Python exception, during which no array's clean-up may run.
  if (status != HSGD_ERR_INTERRUPTED) submitted->collective.give_arrays_back();
  raise_on_error(status, error);
  return true;
}

}  // namespace hsgd::python
