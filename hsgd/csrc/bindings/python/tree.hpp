// The Python binding of the tree. Owns the Python function that makes weights; no logic.
#ifndef HSGD_BINDINGS_PYTHON_TREE_HPP_
#define HSGD_BINDINGS_PYTHON_TREE_HPP_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "hsgd_core.h"
#include "onesided/tree/gradient_tree.hpp"

namespace hsgd::python {

namespace nb = nanobind;

class Tree {
 public:
  // Keeps both, so code that closes the window must wait for run() and drop this object.
  Tree(std::shared_ptr<hsgd_comm> comm, std::shared_ptr<hsgd::NotifiedWindow> window,
       hsgd::Tree::Settings settings);
  // Blocks without the GIL; calls update(version, layers) with it.
  using Update = nb::typed<nb::callable, void(uint64_t, std::vector<uint32_t>)>;
  void run(const Update& update);
  // Weight, buffer (0: none) and group of each parameter of a layer; weight 0: unknown. The caller
  // keeps the memory, and has checked dtypes and strides.
  using Tensor = std::tuple<uintptr_t, uintptr_t, uint32_t>;
  void set_tensors(uint32_t layer, const std::vector<Tensor>& tensors);
  void forget_tensors();
  void set_rules(uint64_t version, const std::vector<LarsRule>& rules);
  // Returns layer, target, begin and end in seconds of the last parcels to other nodes.
  std::vector<std::tuple<uint32_t, int, double, double>> sent() const;

 private:
  std::shared_ptr<hsgd_comm> comm_;
  std::shared_ptr<hsgd::NotifiedWindow> window_;
  std::unique_ptr<hsgd::Tree> tree_;
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_TREE_HPP_
