// How the ranks of a communicator open a notified window, and over which network.
//
// Owns the choice, the bounds of the options, and how ranks tell one another their addresses. Never
// knows MPI: who has it gives the network.
#ifndef HSGD_BINDINGS_C_OPEN_WINDOW_HPP_
#define HSGD_BINDINGS_C_OPEN_WINDOW_HPP_

#include <memory>
#include <string>

#include "onesided/window/notified_window.hpp"

namespace hsgd {

// The same on all ranks.
struct WindowOptions {
  NotifiedWindow::Settings settings;
  bool sockets;            // between nodes over TCP, not MPI
  uint64_t slice_bytes;    // over TCP a write goes in slices of so many; the kernel is given up to
                           // four ahead of what it has sent
  std::string interfaces;  // over TCP; see find_addresses()
};

// Throws HSGD_ERR_ARGUMENT for values that cannot work.
void check_options(const WindowOptions& options);
// Collective over the ranks of `communicator`, which outlives the window; blocking. The caller has
// checked the options. `over_mpi`: used where ranks of other nodes are to be reached over MPI.
std::unique_ptr<NotifiedWindow> open_window(Communicator& communicator,
                                            const WindowOptions& options,
                                            const NotifiedWindow::MakeRma& over_mpi);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_C_OPEN_WINDOW_HPP_
