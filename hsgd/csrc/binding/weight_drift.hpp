// The binding of the change of weights. Owns one class of the module; no logic.
#ifndef HSGD_BINDING_WEIGHT_DRIFT_HPP_
#define HSGD_BINDING_WEIGHT_DRIFT_HPP_

#include <nanobind/nanobind.h>

namespace hsgd::python {

void bind_change(nanobind::module_& module);

}  // namespace hsgd::python

#endif  // HSGD_BINDING_WEIGHT_DRIFT_HPP_
