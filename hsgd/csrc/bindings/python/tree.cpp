// Tree: makes layers from tuples, and calls the update in Python.
#include "bindings/python/tree.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"
#include "core/base/error.hpp"

namespace hsgd::python {
namespace {

using Input = std::tuple<uint32_t, int, uint64_t>;             // slot, memory, offset
using Output = std::tuple<int, uint32_t, uint64_t, uint64_t>;  // target, slot, offset, bytes
using Numbers = std::tuple<uint64_t, uint64_t, int>;           // place, count, dtype

hsgd::Tree::Input input_of(const Input& input) {
  const auto& [slot, memory, offset] = input;
  return {slot, memory, offset};
}

std::vector<hsgd::Tree::Output> outputs_of(const std::vector<Output>& outputs) {
  std::vector<hsgd::Tree::Output> list;
  for (const auto& [target, slot, offset, bytes] : outputs) {
    list.push_back({target, slot, offset, bytes});
  }
  return list;
}

hsgd::Tree::Layer layer_of(const std::vector<Numbers>& numbers, uint32_t flags,
                           const std::vector<Input>& gradients, const std::vector<Output>& up,
                           const Input& weights, const std::vector<Output>& down) {
  hsgd::Tree::Layer layer{{}, flags, {}, outputs_of(up), input_of(weights), outputs_of(down)};
  for (const auto& [place, count, dtype] : numbers) {
    layer.numbers.push_back({place, count, static_cast<hsgd_dtype>(dtype)});
  }
  for (const Input& input : gradients) layer.gradients.push_back(input_of(input));
  return layer;
}

}  // namespace

Tree::Tree(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd::NotifiedWindow> window,
           hsgd::Tree::Settings settings)
    : comm_(std::move(comm)), window_(std::move(window)) {
  hsgd_error error;
  raise_on_error(guarded(&error,
                         [&] {  // local and short, so it keeps the GIL
                           tree_ = std::make_unique<hsgd::Tree>(*window_, std::move(settings));
                         }),
                 error);
}

void Tree::run(const Update& update) {
  std::exception_ptr failure;
  const auto call_update = [&](uint64_t version, const std::vector<uint32_t>& layers) {
    PyGILState_STATE state{};
    take_gil([&] { state = PyGILState_Ensure(); });
    try {
      take_gil([&] { update(version, layers); });
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    PyGILState_Release(state);
    if (failure) throw_error(HSGD_ERR_SYSTEM, -1, "the update of the weights failed");
  };
  try {
    without_gil([&] { tree_->run(call_update); });
  } catch (...) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
}

void Tree::set_tensors(uint32_t layer, const std::vector<Tensor>& tensors) {
  std::vector<ElementUpdate::Tensor> list;
  for (const auto& [weight, buffer, group] : tensors) {
    list.push_back({reinterpret_cast<float*>(weight), reinterpret_cast<float*>(buffer), group});
  }
  without_gil([&] { tree_->elements().set_tensors(layer, std::move(list)); });
}

// Forgets the tensors. Called without the GIL: waits for a running update.
void Tree::forget_tensors() {
  without_gil([&] { tree_->elements().forget(); });
}

void Tree::set_rules(uint64_t version, const std::vector<LarsRule>& rules) {
  without_gil([&] { tree_->elements().set_rules(version, rules); });
}

std::vector<std::tuple<uint32_t, int, double, double>> Tree::sent() const {
  std::vector<std::tuple<uint32_t, int, double, double>> all;
  for (const hsgd::Tree::Sent& each : tree_->sent()) {
    all.emplace_back(each.layer, each.target, 1e-9 * static_cast<double>(each.begin_ns),
                     1e-9 * static_cast<double>(each.end_ns));
  }
  return all;
}

void bind_tree(nb::module_& module) {
  nb::class_<hsgd::Tree::Layer>(module, "TreeLayer")
      .def(
          "__init__",
          [](hsgd::Tree::Layer* self, const std::vector<Numbers>& numbers, uint32_t flags,
             const std::vector<Input>& gradients, const std::vector<Output>& up,
             const Input& weights, const std::vector<Output>& down) {
            new (self) hsgd::Tree::Layer(layer_of(numbers, flags, gradients, up, weights, down));
          },
          nb::kw_only(), nb::arg("numbers"), nb::arg("flags"), nb::arg("gradients"), nb::arg("up"),
          nb::arg("weights"), nb::arg("down"));
  nb::class_<hsgd::Tree::Settings>(module, "TreeOptions")
      .def(
          "__init__",
          [](hsgd::Tree::Settings* self, double divisor, bool whole_step, uint32_t stop_slot,
             uint64_t given_up, uint64_t reason_bytes) {
            new (self)
                hsgd::Tree::Settings{{}, divisor, whole_step, stop_slot, given_up, reason_bytes};
          },
          nb::kw_only(), nb::arg("divisor"), nb::arg("whole_step"), nb::arg("stop_slot"),
          nb::arg("given_up"), nb::arg("reason_bytes"));
  nb::class_<Tree>(module, "Tree")
      .def("run", &Tree::run, nb::arg("update"))
      .def("set_tensors", &Tree::set_tensors, nb::arg("layer"), nb::arg("tensors"))
      .def("forget_tensors", &Tree::forget_tensors)
      .def("set_rules", &Tree::set_rules, nb::arg("version"), nb::arg("rules"))
      .def("sent", &Tree::sent);
}

}  // namespace hsgd::python
