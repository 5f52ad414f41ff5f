// guarded(): turns exceptions into status codes, for the functions of the C interface.
#ifndef HSGD_CORE_BASE_STATUS_HPP_
#define HSGD_CORE_BASE_STATUS_HPP_

#include <algorithm>
#include <cstring>
#include <new>

#include "core/base/error.hpp"
#include "hsgd_core.h"

namespace hsgd {

inline int report(hsgd_error* err, hsgd_status code, int rank, const char* message) {
  if (err != nullptr) {
    err->code = code;
    err->rank = rank;
    const size_t length = std::min(std::strlen(message), sizeof err->message - 1);
    std::memcpy(err->message, message, length);
    err->message[length] = '\0';
  }
  return code;
}

// Runs `body` and turns an exception into a status code and a line in `err`.
template <class Body>
int guarded(hsgd_error* err, Body&& body) noexcept {
  try {
    body();
    return report(err, HSGD_OK, -1, "");
  } catch (const MismatchError& error) {
    if (err != nullptr) std::copy_n(error.sides(), 2, err->sides);
    return report(err, error.code(), error.rank(), error.what());
  } catch (const Error& error) {
    return report(err, error.code(), error.rank(), error.what());
  } catch (const std::bad_alloc&) {
    return report(err, HSGD_ERR_MEMORY, -1, "out of memory");
  } catch (const std::exception& error) {
    return report(err, HSGD_ERR_SYSTEM, -1, error.what());
  }
}

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_STATUS_HPP_
