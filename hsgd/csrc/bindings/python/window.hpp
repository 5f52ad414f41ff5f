// The Python binding of the notified window. Owns the arrays of writes in progress; no logic.
#ifndef HSGD_BINDINGS_PYTHON_WINDOW_HPP_
#define HSGD_BINDINGS_PYTHON_WINDOW_HPP_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays/array.hpp"
#include "bindings/python/tree.hpp"
#include "hsgd_core.h"
#include "onesided/window/notified_window.hpp"

namespace hsgd::python {

class NotifiedWindow {
 public:
  // Keeps the communicator of the window.
  NotifiedWindow(const std::shared_ptr<hsgd_comm>& comm,
                 std::unique_ptr<hsgd::NotifiedWindow> window);
  NotifiedWindow(NotifiedWindow&&) = default;
  NotifiedWindow(const NotifiedWindow&) = delete;

  uint64_t put_notify(const std::vector<std::pair<nb::object, uint64_t>>& pieces, int target,
                      uint32_t slot, uint64_t version, double timeout_s, uint32_t order);
  bool done(uint64_t ticket);
  void drain(double timeout_s);
  std::pair<uint32_t, uint64_t> wait_any(const std::vector<uint32_t>& slots,
                                         const std::vector<uint64_t>& seen, double timeout_s);
  uint64_t test(uint32_t slot);
  uint64_t reset(uint32_t slot);
  void bind(uint32_t slot, int source);
  Anything segment(int rank, uint64_t bytes);
  void end_work();
  void abandon();
  int descriptor() const { return window_ == nullptr ? -1 : window_->descriptor(); }
  Tree tree(std::vector<hsgd::Tree::Layer> layers, hsgd::Tree::Settings settings);
  void close();
  bool closed() const { return window_ == nullptr; }

 private:
  using Arrays = std::deque<Array>;  // a deque, whose elements do not move

  template <class Call>
  auto call(Call&& call);
  void give_arrays_back();

  std::shared_ptr<hsgd_comm> comm_;
  std::shared_ptr<hsgd::NotifiedWindow> window_;
  // Arrays of writes in progress. Each thread in the window also keeps them, because it may write
  // them until it has left.
  struct Open {
    std::deque<std::pair<uint64_t, Arrays>> by_ticket;
    std::deque<Arrays> failed;  // of failed writes: it is unknown how much was sent
  };
  std::shared_ptr<Open> open_ = std::make_shared<Open>();
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_WINDOW_HPP_
