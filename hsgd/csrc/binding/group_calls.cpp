// What torch.distributed's options say, and the simple calls.
#include "binding/group_calls.hpp"

#include <datetime.h>

#include "arrays/array.hpp"
#include "binding/collectives.hpp"

namespace hsgd::python {
namespace {

struct OptionNames {
  PyObject* async_op = PyUnicode_InternFromString("asyncOp");
  PyObject* reduce_op = PyUnicode_InternFromString("reduceOp");
  PyObject* timeout = PyUnicode_InternFromString("timeout");
};

const OptionNames& names() {
  static const OptionNames interned;
  return interned;
}

// An invalid object where there is no such attribute.
nb::object get(nb::handle object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

// Blocks, and has no timeout: torch's mark of none is below 0. Versions without asyncOp want a
// Work.
bool is_simple(nb::handle options) {
  if (!get(options, names().async_op).is(Py_False)) return false;
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  const nb::object timeout = get(options, names().timeout);
  return timeout.is_valid() && PyDelta_Check(timeout.ptr()) != 0 &&
         PyDateTime_DELTA_GET_DAYS(timeout.ptr()) < 0;
}

// The one tensor of a list.
nb::handle only_of(nb::handle tensors) {
  if (PyList_CheckExact(tensors.ptr()) == 0 || PyList_GET_SIZE(tensors.ptr()) != 1) return {};
  return PyList_GET_ITEM(tensors.ptr(), 0);
}

bool is_floating(hsgd_dtype dtype) {
  return dtype == HSGD_FLOAT32 || dtype == HSGD_FLOAT64 || dtype == HSGD_FLOAT16 ||
         dtype == HSGD_BFLOAT16;
}

}  // namespace

bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options) {
  const nb::handle tensor = only_of(tensors);
  if (!tensor.is_valid() || !is_simple(options)) return false;
  const nb::object kind = get(options, names().reduce_op);
  const Array* array = kind.is_valid() ? it.take_flat_in(tensor) : nullptr;
  if (array == nullptr) return false;
  const hsgd_op op = TorchNames::of(tensor.ptr())->op_of(kind.ptr());
  if (op == HSGD_OP_COUNT || (op == HSGD_MEAN && !is_floating(array->dtype()))) return false;
  describe_allreduce(it, *array, *array, op, nb::none());
  return true;
}

bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source,
                          nb::handle options) {
  if (!is_simple(options)) return false;
  const Array* in = it.take_flat_in(source);
  const Array* out = in == nullptr ? nullptr : it.take_flat_out(output);
  if (out == nullptr || out->dtype() != in->dtype() ||
      out->count() != in->count() * static_cast<uint64_t>(it.size()))
    return false;
  describe_allgather(it, *in, nb::none());
  return true;
}

}  // namespace hsgd::python
