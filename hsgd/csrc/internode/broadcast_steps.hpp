// What is common to the ways in which one node's data goes to all, step by step.
//
// Owns the interface. Implementations: slice_broadcast.hpp, where a step is split among all nodes,
// and tree_broadcast.hpp, where two trees carry half of it each.
#ifndef HSGD_INTERNODE_BROADCAST_STEPS_HPP_
#define HSGD_INTERNODE_BROADCAST_STEPS_HPP_

#include <cstddef>

#include "internode/messages.hpp"

namespace hsgd {

class BroadcastSteps : public StepWindow {
 public:
  virtual void start(int root_node) = 0;
  virtual bool is_root() const = 0;
  // The next step: on the root's node its data, elsewhere where it goes.
  virtual void begin(std::byte* data, size_t bytes) = 0;

 protected:
  using StepWindow::StepWindow;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_BROADCAST_STEPS_HPP_
