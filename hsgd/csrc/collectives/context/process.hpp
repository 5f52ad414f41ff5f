// What the communicators of one process share: hsgd_process of the C interface.
//
// Owns nothing but the list. Made and destroyed by the caller, see hsgd_options.
#ifndef HSGD_COLLECTIVES_CONTEXT_PROCESS_HPP_
#define HSGD_COLLECTIVES_CONTEXT_PROCESS_HPP_

#include <memory>

#include "core/os/process_life.hpp"
#include "core/status/status_page.hpp"

struct hsgd_process {
  std::shared_ptr<hsgd::ProcessWatch> watch = std::make_shared<hsgd::ProcessWatch>();
  hsgd::StatusPages status;
};

#endif  // HSGD_COLLECTIVES_CONTEXT_PROCESS_HPP_
