// Declares the functions with which each file of the binding adds to the module.
#ifndef HSGD_BINDINGS_PYTHON_BINDINGS_HPP_
#define HSGD_BINDINGS_PYTHON_BINDINGS_HPP_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "hsgd_core.h"

namespace hsgd::python {

// Options that own the names of the ranks.
struct Options : hsgd_options {
  Options();
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  std::vector<int32_t> names;
};

void bind_comm(nanobind::module_& module);
void bind_box(nanobind::module_& module);
void bind_window(nanobind::module_& module);
void bind_tree(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_lars(nanobind::module_& module);
void bind_weight_drift(nanobind::module_& module);
void bind_compression(nanobind::module_& module);

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_BINDINGS_HPP_
