// The Python binding of steps of LARS: one structure and one function, no logic.
#include "core/kernels/lars.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"

namespace hsgd::python {
namespace {

// The data that a step keeps of a tensor's weights for the next one: their square, 0 if not kept,
// and a checksum of a few of them.
using Kept = std::tuple<double, uint64_t>;
// Addresses of weight, gradient and buffer (0: none), the number of elements, and the data kept by
// the last step. The caller has checked dtypes and strides, and keeps the memory until the step is
// done.
using Row = std::tuple<uintptr_t, uintptr_t, uintptr_t, uint64_t, double, uint64_t>;

std::vector<Kept> step(const std::vector<Row>& rows, const LarsRule& rule, int threads) {
  std::vector<LarsTensor> tensors;
  tensors.reserve(rows.size());
  for (const auto& [weight, gradient, buffer, count, square, sample] : rows) {
    tensors.push_back({reinterpret_cast<float*>(weight), reinterpret_cast<const float*>(gradient),
                       reinterpret_cast<float*>(buffer), count, square, sample});
  }
  without_gil([&] { lars_step(tensors.data(), tensors.size(), rule, threads); });
  std::vector<Kept> kept;
  kept.reserve(tensors.size());
  for (const LarsTensor& tensor : tensors) kept.emplace_back(tensor.square, tensor.sample);
  return kept;
}

}  // namespace

void bind_lars(nb::module_& module) {
  nb::class_<LarsRule>(module, "LarsRule")
      .def(
          "__init__",
          [](LarsRule* self, double lr, double momentum, double weight_decay,
             double trust_coefficient, double eps, bool adapt, int norm_of, bool lr_in_momentum,
             bool clip, bool plain_at_zero, bool nesterov) {
            new (self) LarsRule{lr,
                                momentum,
                                weight_decay,
                                trust_coefficient,
                                eps,
                                adapt,
                                static_cast<LarsNorm>(norm_of),
                                lr_in_momentum,
                                clip,
                                plain_at_zero,
                                nesterov};
          },
          nb::kw_only(), nb::arg("lr"), nb::arg("momentum"), nb::arg("weight_decay"),
          nb::arg("trust_coefficient"), nb::arg("eps"), nb::arg("adapt"), nb::arg("norm_of"),
          nb::arg("lr_in_momentum"), nb::arg("clip"), nb::arg("plain_at_zero"),
          nb::arg("nesterov"));
  module.def("lars_step", &step, nb::arg("tensors"), nb::arg("rule"), nb::arg("threads"));
}

}  // namespace hsgd::python
