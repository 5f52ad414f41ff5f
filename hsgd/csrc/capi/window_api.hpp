// What a hsgd_window is: for the files that implement the C interface and nobody else.
#ifndef HSGD_CAPI_WINDOW_API_HPP_
#define HSGD_CAPI_WINDOW_API_HPP_

#include "capi/handles.hpp"
#include "hsgd_core.h"
#include "onesided/notified_window.hpp"

struct hsgd_window {
  hsgd::NotifiedWindow window;
};

namespace hsgd {

// Collective over the ranks of `comm`. Throws HSGD_ERR_ARGUMENT for values that cannot work, before
// anything is sent.
HSGD_API hsgd_window* new_window(hsgd_comm* comm, const hsgd_window_options& options,
                                 const NotifiedWindow::MakeRma& make);

}  // namespace hsgd

#endif  // HSGD_CAPI_WINDOW_API_HPP_
