// hsgd_process: the state that the communicators of one process share.
//
// The caller creates and destroys it, see hsgd_options.
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
