#include "binding/tree.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <exception>
#include <utility>

#include "binding/collective_call.hpp"
#include "binding/gil.hpp"

namespace hsgd::python {
namespace {

hsgd_tree_input input_of(const Tree::Input& input) {
  const auto& [slot, memory, offset] = input;
  return {slot, memory, offset};
}

std::vector<hsgd_tree_output> outputs_of(const std::vector<Tree::Output>& outputs) {
  std::vector<hsgd_tree_output> list;
  for (const auto& [target, slot, offset, bytes] : outputs) {
    list.push_back({target, slot, offset, bytes});
  }
  return list;
}

// What one layer points to while the tree is made.
struct Lists {
  explicit Lists(const Tree::Layer& layer)
      : up(outputs_of(layer.up)), down(outputs_of(layer.down)) {
    for (const auto& [place, count, dtype] : layer.numbers) {
      numbers.push_back({place, count, static_cast<hsgd_dtype>(dtype)});
    }
    for (const Tree::Input& input : layer.gradients) gradients.push_back(input_of(input));
  }
  hsgd_tree_layer layer(const Tree::Layer& its) const {
    return {numbers.data(),
            gradients.data(),
            up.data(),
            down.data(),
            static_cast<uint32_t>(numbers.size()),
            static_cast<uint32_t>(gradients.size()),
            static_cast<uint32_t>(up.size()),
            static_cast<uint32_t>(down.size()),
            its.flags,
            input_of(its.weights)};
  }
  std::vector<hsgd_tree_numbers> numbers;
  std::vector<hsgd_tree_input> gradients;
  std::vector<hsgd_tree_output> up;
  std::vector<hsgd_tree_output> down;
};

struct Call {
  nb::object update;
  std::exception_ptr failure;
};

int call_update(void* context, uint64_t version, const uint32_t* layers, uint32_t count) {
  Call& call = *static_cast<Call*>(context);
  PyGILState_STATE state{};
  take_gil([&] { state = PyGILState_Ensure(); });
  try {
    take_gil([&] { call.update(version, std::vector<uint32_t>(layers, layers + count)); });
  } catch (const std::exception&) {
    call.failure = std::current_exception();
  }
  PyGILState_Release(state);
  return call.failure ? 1 : 0;
}

}  // namespace

Tree::Tree(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd_window> window,
           const std::vector<Layer>& layers, const Options& options)
    : comm_(std::move(comm)), window_(std::move(window)) {
  std::deque<Lists> lists;
  std::vector<hsgd_tree_layer> list;
  for (const Layer& layer : layers) list.push_back(lists.emplace_back(layer).layer(layer));
  const hsgd_tree_options made{sizeof(hsgd_tree_options),
                               static_cast<uint32_t>(list.size()),
                               list.data(),
                               options.divisor,
                               options.whole_step ? 1U : 0U,
                               options.stop_slot,
                               options.given_up,
                               options.reason_bytes};
  hsgd_tree* tree = nullptr;
  hsgd_error error{};
  raise_on_error(hsgd_tree_create(window_.get(), &made, &tree, &error), error);
  tree_.reset(tree, hsgd_tree_destroy);
}

void Tree::run(nb::object update) {
  Call call{std::move(update), nullptr};
  hsgd_error error{};
  int status = 0;
  {
    const ReleasedGil released;
    status = hsgd_tree_run(tree_.get(), call_update, &call, &error);
  }
  if (call.failure) std::rethrow_exception(call.failure);
  raise_on_error(status, error);
}

void Tree::set_tensors(uint32_t layer, const std::vector<Tensor>& tensors) {
  std::vector<hsgd_tree_tensor> list;
  for (const auto& [weight, buffer, group] : tensors) {
    list.push_back({reinterpret_cast<float*>(weight), reinterpret_cast<float*>(buffer), group});
  }
  hsgd_error error{};
  raise_on_error(hsgd_tree_set_tensors(tree_.get(), layer, list.data(),
                                       static_cast<uint32_t>(list.size()), &error),
                 error);
}

// Without the GIL: waits for an update that is under way.
void Tree::forget_tensors() {
  const ReleasedGil released;
  hsgd_tree_forget_tensors(tree_.get());
}

void Tree::set_rules(uint64_t version, const std::vector<hsgd_lars_rule>& rules) {
  hsgd_error error{};
  int status = 0;
  {
    const ReleasedGil released;
    status = hsgd_tree_set_rules(tree_.get(), version, rules.data(),
                                 static_cast<uint32_t>(rules.size()), &error);
  }
  raise_on_error(status, error);
}

std::vector<std::tuple<uint32_t, int, double, double>> Tree::sent() const {
  std::vector<hsgd_tree_sent> list(1024);
  list.resize(hsgd_tree_last_sent(tree_.get(), list.data(), static_cast<uint32_t>(list.size())));
  std::vector<std::tuple<uint32_t, int, double, double>> all;
  for (const hsgd_tree_sent& each : list) {
    all.emplace_back(each.layer, each.target, 1e-9 * static_cast<double>(each.begin_ns),
                     1e-9 * static_cast<double>(each.end_ns));
  }
  return all;
}

void bind_tree(nb::module_& module) {
  nb::class_<Tree::Layer>(module, "TreeLayer")
      .def(
          "__init__",
          [](Tree::Layer* self, std::vector<Tree::Numbers> numbers, uint32_t flags,
             std::vector<Tree::Input> gradients, std::vector<Tree::Output> up, Tree::Input weights,
             std::vector<Tree::Output> down) {
            new (self) Tree::Layer{std::move(numbers), flags,   std::move(gradients),
                                   std::move(up),      weights, std::move(down)};
          },
          nb::kw_only(), nb::arg("numbers"), nb::arg("flags"), nb::arg("gradients"), nb::arg("up"),
          nb::arg("weights"), nb::arg("down"));
  nb::class_<Tree::Options>(module, "TreeOptions")
      .def(
          "__init__",
          [](Tree::Options* self, double divisor, bool whole_step, uint32_t stop_slot,
             uint64_t given_up, uint64_t reason_bytes) {
            new (self) Tree::Options{divisor, whole_step, stop_slot, given_up, reason_bytes};
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
