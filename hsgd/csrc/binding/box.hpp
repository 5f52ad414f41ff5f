// The binding of the parameter box. Owns one class of the module; no logic.
#ifndef HSGD_BINDING_BOX_HPP_
#define HSGD_BINDING_BOX_HPP_

#include <nanobind/nanobind.h>

namespace hsgd::python {

void bind_box(nanobind::module_& module);

}  // namespace hsgd::python

#endif  // HSGD_BINDING_BOX_HPP_
