// What the communicators of one process share: hsgd_process of the C interface.
//
// Owns nothing but the list. Made and destroyed by the caller, see hsgd_options.
#ifndef HSGD_CONTEXT_PROCESS_HPP_
#define HSGD_CONTEXT_PROCESS_HPP_

#include <memory>

#include "os/process_life.hpp"
#include "status/status_page.hpp"

struct hsgd_process {
  std::shared_ptr<hsgd::ProcessWatch> watch = std::make_shared<hsgd::ProcessWatch>();
  hsgd::StatusPages status;
};

#endif  // HSGD_CONTEXT_PROCESS_HPP_
