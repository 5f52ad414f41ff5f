// The C interface over Tree.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/status.hpp"
#include "capi/window_api.hpp"
#include "tree/gradient_tree.hpp"

struct hsgd_tree {
  hsgd::Tree tree;
};

namespace hsgd {
namespace {

Tree::Input input_of(const hsgd_tree_input& input) {
  return {input.slot, input.memory, input.offset};
}

std::vector<Tree::Output> outputs_of(const hsgd_tree_output* outputs, uint32_t count) {
  std::vector<Tree::Output> list;
  for (uint32_t i = 0; i < count; ++i) {
    list.push_back({outputs[i].target, outputs[i].slot, outputs[i].offset, outputs[i].bytes});
  }
  return list;
}

Tree::Layer layer_of(const hsgd_tree_layer& layer) {
  Tree::Layer its;
  for (uint32_t i = 0; i < layer.number_count; ++i) {
    const hsgd_tree_numbers& numbers = layer.numbers[i];
    if (hsgd_dtype_bytes(numbers.dtype) == 0) {
      throw Error(HSGD_ERR_ARGUMENT, -1,
                  text("Tree: dtype %d is unknown", static_cast<int>(numbers.dtype)));
    }
    its.numbers.push_back({numbers.place, numbers.count, numbers.dtype});
  }
  for (uint32_t i = 0; i < layer.gradient_count; ++i) {
    its.gradients.push_back(input_of(layer.gradients[i]));
  }
  its.up = outputs_of(layer.up, layer.up_count);
  its.down = outputs_of(layer.down, layer.down_count);
  its.flags = layer.flags;
  its.weights = input_of(layer.weights);
  return its;
}

Tree::Settings settings_of(const hsgd_tree_options& options) {
  if (options.struct_bytes != sizeof(hsgd_tree_options) || options.layer_count == 0) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "hsgd_tree_options has another size, or no layers; caller and libhsgd_core may "
                "differ in version");
  }
  Tree::Settings settings{{},
                          options.divisor,
                          options.whole_step != 0,
                          options.stop_slot,
                          options.given_up,
                          options.reason_bytes};
  for (uint32_t i = 0; i < options.layer_count; ++i) {
    settings.layers.push_back(layer_of(options.layers[i]));
  }
  return settings;
}

}  // namespace
}  // namespace hsgd

using hsgd::guarded;

int hsgd_tree_create(hsgd_window* window, const hsgd_tree_options* options, hsgd_tree** tree,
                     hsgd_error* err) {
  return guarded(err, [&] {
    *tree = nullptr;
    *tree = new hsgd_tree{{window->window, hsgd::settings_of(*options)}};
  });
}

void hsgd_tree_destroy(hsgd_tree* tree) { delete tree; }

int hsgd_tree_run(hsgd_tree* tree, hsgd_tree_update update, void* context, hsgd_error* err) {
  return guarded(err, [&] {
    tree->tree.run([&](uint64_t version, const std::vector<uint32_t>& layers) {
      if (update(context, version, layers.data(), static_cast<uint32_t>(layers.size())) == 0) {
        return;
      }
      throw hsgd::Error(HSGD_ERR_SYSTEM, -1, "the update of the weights failed");
    });
  });
}

int hsgd_tree_set_tensors(hsgd_tree* tree, uint32_t layer, const hsgd_tree_tensor* tensors,
                          uint32_t count, hsgd_error* err) {
  return guarded(err, [&] {
    std::vector<hsgd::ElementUpdate::Tensor> list;
    for (uint32_t i = 0; i < count; ++i) {
      list.push_back({tensors[i].weight, tensors[i].buffer, tensors[i].group});
    }
    tree->tree.elements().set_tensors(layer, std::move(list));
  });
}

void hsgd_tree_forget_tensors(hsgd_tree* tree) { tree->tree.elements().forget(); }

int hsgd_tree_set_rules(hsgd_tree* tree, uint64_t version, const hsgd_lars_rule* rules,
                        uint32_t count, hsgd_error* err) {
  return guarded(err, [&] { tree->tree.elements().set_rules(version, {rules, rules + count}); });
}

uint32_t hsgd_tree_last_sent(const hsgd_tree* tree, hsgd_tree_sent* sent, uint32_t capacity) {
  const auto all = tree->tree.sent();
  const size_t count = std::min<size_t>(all.size(), capacity);
  for (size_t i = 0; i < count; ++i) {
    const auto& each = all[all.size() - count + i];
    sent[i] = {each.layer, each.target, each.begin_ns, each.end_ns};
  }
  return static_cast<uint32_t>(count);
}
