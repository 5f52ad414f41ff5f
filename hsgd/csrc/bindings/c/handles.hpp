// hsgd_comm and other handles as C++ structs, for bindings and device.
#ifndef HSGD_BINDINGS_C_HANDLES_HPP_
#define HSGD_BINDINGS_C_HANDLES_HPP_

#include <cstddef>
#include <memory>

#include "bindings/c/open_window.hpp"
#include "collectives/queue/communicator.hpp"
#include "collectives/queue/submission_queue.hpp"
#include "hsgd_core.h"

struct hsgd_comm {
  std::unique_ptr<hsgd::Communicator> communicator;
  std::shared_ptr<hsgd::Submissions> submissions;  // closed before the communicator is destroyed
};

struct hsgd_buffer {
  std::shared_ptr<hsgd::SharedBuffer> memory;
  std::byte* data;  // this rank's part, or the whole array of the node
};

namespace hsgd {

// Throws HSGD_ERR_ARGUMENT for values that cannot work.
HSGD_API void check_options(const hsgd_options& options);
HSGD_API hsgd_comm* new_comm(std::unique_ptr<Communicator> communicator);
// Calls open_window() after all earlier asynchronous collectives; the options are checked first.
HSGD_API std::unique_ptr<NotifiedWindow> new_window(hsgd_comm& comm, const WindowOptions& options,
                                                    const NotifiedWindow::MakeRma& over_mpi);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_C_HANDLES_HPP_
