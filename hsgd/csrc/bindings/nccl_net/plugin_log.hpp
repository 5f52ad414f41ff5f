// Lines in NCCL's log, by the function that NCCL hands over at init.
//
// The function is one for the process: most tables of NCCL give the calls that follow no context.
#ifndef HSGD_BINDINGS_NCCL_NET_PLUGIN_LOG_HPP_
#define HSGD_BINDINGS_NCCL_NET_PLUGIN_LOG_HPP_

#include <new>
#include <string>

#include "bindings/nccl_net/nccl_tables.hpp"
#include "core/base/error.hpp"

namespace hsgd::nccl_net {

void set_logger(Logger logger);
void log_warning(const char* line) noexcept;
void log_info(const std::string& line) noexcept;

// Returns what NCCL is told of an error of hsgd.
Result result_of(const Error& error);

// Runs `body`. Turns an exception into a result of NCCL and a warning in its log.
template <class Body>
Result guarded(Body&& body) noexcept {
  try {
    body();
    return kSuccess;
  } catch (const Error& error) {
    log_warning(error.what());
    return result_of(error);
  } catch (const std::bad_alloc&) {
    log_warning("out of memory");
  } catch (const std::exception& error) {
    log_warning(error.what());
  }
  return kSystemError;
}

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_PLUGIN_LOG_HPP_
