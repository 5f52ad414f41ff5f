// Reads torch.distributed's options and fills in the simple calls.
#include "bindings/python/group_calls.hpp"

#include <datetime.h>

#include "bindings/arrays/array.hpp"
#include "bindings/python/collectives.hpp"

namespace hsgd::python {
namespace {

struct OptionNames {
  PyObject* async_op = PyUnicode_InternFromString("asyncOp");
  PyObject* reduce_op = PyUnicode_InternFromString("reduceOp");
  PyObject* root_rank = PyUnicode_InternFromString("rootRank");
  PyObject* timeout = PyUnicode_InternFromString("timeout");
};

const OptionNames& names() {
  static const OptionNames interned;
  return interned;
}

// Returns the attribute; an invalid object if it does not exist.
nb::object get(nb::handle object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

// Returns true if a pass of autograd runs in this thread.
bool is_in_backward() {
  static PyObject* const current = [] {
    nb::object function = nb::module_::import_("torch").attr("_C").attr("_current_graph_task_id");
    return function.release().ptr();
  }();
  return nb::cast<int>(nb::handle(current)()) >= 0;
}

// Returns the only tensor of a list.
nb::handle only_of(nb::handle tensors) {
  if (PyList_CheckExact(tensors.ptr()) == 0 || PyList_GET_SIZE(tensors.ptr()) != 1) return {};
  return PyList_GET_ITEM(tensors.ptr(), 0);
}

bool is_floating(hsgd_dtype dtype) {
  return dtype == HSGD_FLOAT32 || dtype == HSGD_FLOAT64 || dtype == HSGD_FLOAT16 ||
         dtype == HSGD_BFLOAT16;
}

// Returns the op; HSGD_OP_COUNT if the core cannot reduce such a tensor with it.
hsgd_op op_of(nb::handle options, nb::handle tensor, const Array& array) {
  const nb::object kind = get(options, names().reduce_op);
  if (!kind.is_valid()) return HSGD_OP_COUNT;
  const hsgd_op op = TorchNames::of(tensor.ptr())->op_of(kind.ptr());
  return op == HSGD_MEAN && !is_floating(array.dtype()) ? HSGD_OP_COUNT : op;
}

// Returns true if `whole` has a part like `share` for each of `ranks`.
bool are_shares(const Array& share, const Array& whole, int ranks) {
  return share.dtype() == whole.dtype() &&
         whole.count() == share.count() * static_cast<uint64_t>(ranks);
}

}  // namespace

// Returns the request in `options`. torch marks no timeout by a negative value. Versions without
// asyncOp want a Work of every call.
Asked asked_by(nb::handle options) {
  const nb::object async_op = get(options, names().async_op);
  if (!async_op.is(Py_False) && !async_op.is(Py_True)) return Asked::kOther;
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  const nb::object timeout = get(options, names().timeout);
  if (!timeout.is_valid() || PyDelta_Check(timeout.ptr()) == 0 ||
      PyDateTime_DELTA_GET_DAYS(timeout.ptr()) >= 0) {
    return Asked::kOther;
  }
  return async_op.is(Py_True) ? Asked::kAsync : Asked::kBlocking;
}

bool may_be_queued(const Collective& it) {
  const hsgd_call& call = it.call();
  const bool is_bucket =
      call.kind == HSGD_ALLREDUCE && call.count >= kLeastBucketBytes / hsgd_dtype_bytes(call.dtype);
  return !is_bucket && !is_in_backward();
}

bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options) {
  const nb::handle tensor = only_of(tensors);
  if (!tensor.is_valid()) return false;
  const Array* array = it.take_flat_in(tensor);
  const hsgd_op op = array == nullptr ? HSGD_OP_COUNT : op_of(options, tensor, *array);
  if (op == HSGD_OP_COUNT) return false;
  describe_allreduce(it, *array, *array, op, nb::none());
  return true;
}

bool fill_group_reduce_scatter(Collective& it, nb::handle output, nb::handle source,
                               nb::handle options) {
  const Array* in = it.take_flat_in(source);
  const Array* out = in == nullptr ? nullptr : it.take_flat_out(output);
  if (out == nullptr || !are_shares(*out, *in, it.size())) return false;
  const hsgd_op op = op_of(options, source, *in);
  if (op == HSGD_OP_COUNT) return false;
  describe_reduce_scatter(it, *in, *out, op, Rows(static_cast<size_t>(it.size()), out->count()),
                          nb::none());
  return true;
}

bool fill_group_broadcast(Collective& it, nb::handle tensors, nb::handle options) {
  const nb::handle tensor = only_of(tensors);
  if (!tensor.is_valid()) return false;
  const nb::object root = get(options, names().root_rank);
  if (!root.is_valid() || PyLong_CheckExact(root.ptr()) == 0) return false;
  const Array* array = it.take_flat_out(tensor);
  const long rank = PyLong_AsLong(root.ptr());
  if (array == nullptr || rank < 0 || rank >= it.size()) return false;
  describe_broadcast(it, *array, static_cast<int>(rank), nb::none());
  return true;
}

bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source,
                          nb::handle /*options*/) {
  const Array* in = it.take_flat_in(source);
  const Array* out = in == nullptr ? nullptr : it.take_flat_out(output);
  if (out == nullptr || !are_shares(*in, *out, it.size())) return false;
  describe_allgather(it, *in, nb::none());
  return true;
}

}  // namespace hsgd::python
