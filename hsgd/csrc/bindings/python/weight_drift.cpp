// The Python binding of the drift of weights: one class, no logic.
#include "core/kernels/weight_drift.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"

namespace hsgd::python {
namespace {

// Addresses of both places, rows, their length and stride, and the weight of an element. The caller
// has checked dtypes and shapes, and keeps the memory as long as the table.
using Part = std::tuple<uintptr_t, uintptr_t, uint64_t, uint64_t, uint64_t, double>;

class ChangeTable {
 public:
  explicit ChangeTable(const std::vector<Part>& parts) {
    for (const auto& [now, last, rows, length, stride, weight] : parts) {
      parts_.push_back({reinterpret_cast<const float*>(now), reinterpret_cast<const float*>(last),
                        rows, length, stride, weight});
    }
  }
  double square() const {
    return without_gil([&] { return drift_square(parts_); });
  }

 private:
  std::vector<DriftPart> parts_;
};

}  // namespace

void bind_weight_drift(nb::module_& module) {
  nb::class_<ChangeTable>(module, "ChangeTable")
      .def(nb::init<const std::vector<Part>&>(), nb::arg("parts"))
      .def("square", &ChangeTable::square);
}

}  // namespace hsgd::python
