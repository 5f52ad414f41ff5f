// TorchNames: looks up torch's classes, dtypes and ops once.
#include "bindings/arrays/torch_names.hpp"

#include <nanobind/nanobind.h>

#include <cstring>
#include <string>

namespace hsgd::python {
namespace {

namespace nb = nanobind;

// Returns the number of an enumeration's member, or -1.
long number_of(nb::handle member) {
  const nb::object number = nb::steal(PyNumber_Long(member.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    return -1;
  }
  return PyLong_AsLong(number.ptr());
}

// Returns true if the hashes of ReduceOp objects are the numbers of their kinds, which take longer
// to read.
bool hashes_are_numbers(nb::handle kinds, const long* numbers, int count,
                        const char* const* names) {
  for (int op = 0; op < count; ++op) {
    const nb::object made =
        nb::steal(PyObject_CallOneArg(kinds.ptr(), kinds.attr(names[op]).ptr()));
    if (!made.is_valid() || Py_TYPE(made.ptr()) != reinterpret_cast<PyTypeObject*>(kinds.ptr()) ||
        PyObject_Hash(made.ptr()) != numbers[op]) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }

PyObject* kept(nb::object object) { return object.release().ptr(); }

}  // namespace

TorchNames::TorchNames()
    : data_ptr(intern("data_ptr")),
      dtype(intern("dtype")),
      is_contiguous(intern("is_contiguous")),
      is_cpu(intern("is_cpu")),
      is_neg(intern("is_neg")),
      layout(intern("layout")),
      shape(intern("shape")) {
  const nb::module_ torch = nb::module_::import_("torch");
  strided = kept(torch.attr("strided"));
  tensor_ = reinterpret_cast<PyTypeObject*>(kept(torch.attr("Tensor")));
  parameter_ = reinterpret_cast<PyTypeObject*>(kept(torch.attr("nn").attr("Parameter")));
  for (int code = 0; code < HSGD_DTYPE_COUNT; ++code) {
    dtypes_[code] = kept(torch.attr(hsgd_dtype_name(static_cast<hsgd_dtype>(code))));
  }
  constexpr const char* kOps[] = {"SUM", "AVG", "MIN", "MAX", "PRODUCT"};
  static_assert(HSGD_SUM == 0 && HSGD_MEAN == 1 && HSGD_MIN == 2 && HSGD_MAX == 3 &&
                HSGD_PROD == 4 && HSGD_OP_COUNT == 5);
  const nb::object distributed = nb::getattr(torch, "distributed", nb::none());
  const nb::object kinds = nb::getattr(distributed, "ReduceOp", nb::none());  // not in all builds
  for (int op = 0; op < HSGD_OP_COUNT; ++op) {
    ops_[op] = kinds.is_none() ? -1 : number_of(kinds.attr(kOps[op]));
  }
  const bool are_numbers = !kinds.is_none() && hashes_are_numbers(kinds, ops_, HSGD_OP_COUNT, kOps);
  reduce_op_ = are_numbers ? reinterpret_cast<PyTypeObject*>(kept(kinds)) : nullptr;
}

const TorchNames* TorchNames::load() {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  if (modules == nullptr || PyDict_GetItemString(modules, "torch") == nullptr) return nullptr;
  static const TorchNames names;
  return &names;
}

const TorchNames* TorchNames::of(PyObject* object) {
  static const TorchNames* names = nullptr;
  const PyTypeObject* type = Py_TYPE(object);
  if (names == nullptr) {
    const bool may_be =
        std::strcmp(type->tp_name, "Tensor") == 0 || std::strcmp(type->tp_name, "Parameter") == 0;
    if (!may_be || (names = load()) == nullptr) return nullptr;
  }
  return names->is_plain(type) ? names : nullptr;
}

hsgd_dtype TorchNames::dtype_of(PyObject* dtype) const {
  int code = 0;
  while (code < HSGD_DTYPE_COUNT && dtypes_[code] != dtype) ++code;
  return static_cast<hsgd_dtype>(code);
}

hsgd_op TorchNames::op_of(PyObject* op) const {
  const long number = Py_TYPE(op) == reduce_op_
                          ? PyObject_Hash(op)
                          : number_of(nb::getattr(nb::handle(op), "op", nb::borrow(op)));
  int code = 0;
  while (code < HSGD_OP_COUNT && (number < 0 || ops_[code] != number)) ++code;
  return static_cast<hsgd_op>(code);
}

}  // namespace hsgd::python
