// What the binding knows of torch: its classes and dtypes, by name. No header of torch is needed,
// so that one build serves every version.
//
// Owns the references, taken when the first tensor comes. Everything here needs the GIL.
#ifndef HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_
#define HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_

#include <Python.h>

#include "hsgd_core.h"

namespace hsgd::python {

class TorchNames {
 public:
  // nullptr where `object` is no plain tensor: exactly a torch.Tensor or an nn.Parameter, as
  // subclasses may have no memory of their own.
  static const TorchNames* of(PyObject* object);

  // HSGD_DTYPE_COUNT: the core has none.
  hsgd_dtype dtype_of(PyObject* dtype) const;
  // Of a torch.distributed.ReduceOp, or one of its kinds; HSGD_OP_COUNT: the core has none.
  hsgd_op op_of(PyObject* op) const;

  PyObject* strided;  // torch.strided
  // Names of attributes and methods.
  PyObject *data_ptr, *dtype, *is_contiguous, *is_cpu, *is_neg, *layout, *shape;

 private:
  TorchNames();
  static const TorchNames* load();
  bool is_plain(const PyTypeObject* type) const { return type == tensor_ || type == parameter_; }

  const PyTypeObject *tensor_, *parameter_;
  const PyTypeObject* reduce_op_;  // whose hash is the number of its kind; nullptr: it is not
  PyObject* dtypes_[HSGD_DTYPE_COUNT];
  long ops_[HSGD_OP_COUNT];  // torch's numbers of its kinds; -1: torch has none
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_
