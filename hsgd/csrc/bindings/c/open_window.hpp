// open_window(): opens a notified window for the ranks of a communicator, and chooses its network.
//
// Also checks the options and exchanges addresses. Independent of MPI: the caller passes in that
// network.
#ifndef HSGD_BINDINGS_C_OPEN_WINDOW_HPP_
#define HSGD_BINDINGS_C_OPEN_WINDOW_HPP_

#include <memory>
#include <string>

#include "onesided/window/notified_window.hpp"

namespace hsgd {

// The options of a window; the same on all ranks.
struct WindowOptions {
  NotifiedWindow::Settings settings;
  bool sockets;          // between nodes over TCP, not MPI
  uint64_t slice_bytes;  // over TCP: bytes of a slice of a write; the kernel gets up to four slices
                         // ahead of the sent data
  std::string interfaces;  // over TCP; see find_addresses()
};

// Throws HSGD_ERR_ARGUMENT for values that cannot work.
void check_options(const WindowOptions& options);
// Opens a window; all ranks of `communicator`, which must outlive it, must call this; blocks. The
// caller has checked the options. `over_mpi`: used if other nodes are reached over MPI.
std::unique_ptr<NotifiedWindow> open_window(Communicator& communicator,
                                            const WindowOptions& options,
                                            const NotifiedWindow::MakeRma& over_mpi);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_C_OPEN_WINDOW_HPP_
