// What a hsgd_exchange is: for the files that implement the C interface and nobody else.
#ifndef HSGD_CAPI_NOTIFY_API_HPP_
#define HSGD_CAPI_NOTIFY_API_HPP_

#include "capi/handles.hpp"
#include "hsgd_core.h"
#include "onesided/notified_window.hpp"

struct hsgd_exchange {
  hsgd::NotifiedExchange exchange;
};

namespace hsgd {

// Collective over the ranks of `comm`. Throws HSGD_ERR_ARGUMENT for values that cannot work, before
// anything is sent.
HSGD_API hsgd_exchange* new_exchange(hsgd_comm* comm, const hsgd_exchange_options& options,
                                     const NotifiedExchange::MakeRma& make);

}  // namespace hsgd

#endif  // HSGD_CAPI_NOTIFY_API_HPP_
