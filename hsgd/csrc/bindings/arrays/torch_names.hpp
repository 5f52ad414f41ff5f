// TorchNames: torch's classes and dtypes, looked up by name. Needs no header of torch, so that one
// build serves every version.
//
// Owns the references, taken when the first tensor is passed. All functions need the GIL.
#ifndef HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_
#define HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_

#include <Python.h>

#include "hsgd_core.h"

namespace hsgd::python {

class TorchNames {
 public:
  // Returns nullptr if `object` is no plain tensor: exactly a torch.Tensor or an nn.Parameter,
  // because subclasses may have no memory of their own.
  static const TorchNames* of(PyObject* object);

  // Returns the dtype, or HSGD_DTYPE_COUNT if the core has none.
  hsgd_dtype dtype_of(PyObject* dtype) const;
  // Returns the op of a torch.distributed.ReduceOp or one of its kinds; HSGD_OP_COUNT if the core
  // has none.
  hsgd_op op_of(PyObject* op) const;

  PyObject* strided;  // torch.strided
  // Names of attributes and methods.
  PyObject *data_ptr, *dtype, *is_contiguous, *is_cpu, *is_neg, *layout, *shape;

 private:
  TorchNames();
  static const TorchNames* load();
  bool is_plain(const PyTypeObject* type) const { return type == tensor_ || type == parameter_; }

  const PyTypeObject *tensor_, *parameter_;
  const PyTypeObject* reduce_op_;  // class whose hash is the number of its kind; nullptr: none
  PyObject* dtypes_[HSGD_DTYPE_COUNT];
  long ops_[HSGD_OP_COUNT];  // torch's numbers of its kinds; -1: torch has none
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_ARRAYS_TORCH_NAMES_HPP_
