// The binding of the LARS step. Owns one function of the module; no logic.
#ifndef HSGD_BINDING_LARS_HPP_
#define HSGD_BINDING_LARS_HPP_

#include <nanobind/nanobind.h>

namespace hsgd::python {

void bind_lars(nanobind::module_& module);

}  // namespace hsgd::python

#endif  // HSGD_BINDING_LARS_HPP_
