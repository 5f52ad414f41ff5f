#include "bindings/nccl_net/plugin_log.hpp"

#include <atomic>

namespace hsgd::nccl_net {
namespace {

// Partner: itself. init() of several communicators stores the same function; others only load it.
std::atomic<Logger> known_logger{nullptr};

}  // namespace

void set_logger(Logger logger) { known_logger.store(logger, std::memory_order_release); }

void log_warning(const char* line) noexcept {
  const Logger logger = known_logger.load(std::memory_order_acquire);
  if (logger != nullptr) logger(kWarning, ~0UL, __FILE__, __LINE__, "NET/hsgd : %s", line);
}

void log_info(const std::string& line) noexcept {
  const Logger logger = known_logger.load(std::memory_order_acquire);
  if (logger == nullptr) return;
  logger(kInfo, kInitSubsystem | kNetSubsystem, __func__, __LINE__, "NET/hsgd : %s", line.c_str());
}

Result result_of(const Error& error) {
  switch (error.code()) {
    case HSGD_ERR_PEER_LOST:
    case HSGD_ERR_TIMEOUT:
      return kRemoteError;
    case HSGD_ERR_ARGUMENT:
    case HSGD_ERR_SIGNATURE:
      return kInvalidUsage;
    default:
      return kSystemError;
  }
}

}  // namespace hsgd::nccl_net
