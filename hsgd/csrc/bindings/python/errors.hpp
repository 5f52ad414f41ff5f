// Errors of the core as Python's exceptions: the one place where they are translated.
//
// Owns how the core is called: without the lock, and with what it throws turned into what Python
// raises.
#ifndef HSGD_BINDINGS_PYTHON_ERRORS_HPP_
#define HSGD_BINDINGS_PYTHON_ERRORS_HPP_

#include <nanobind/nanobind.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "bindings/python/gil.hpp"
#include "core/base/status.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

namespace nb = nanobind;

// Throws the exception that stands for a status of the core; nothing for HSGD_OK.
void raise_on_error(int status, const hsgd_error& error);
// The same for "this WHAT is closed".
[[noreturn]] void raise_closed(const char* what);

// For the thread that ends the program: errors of other threads reach nobody from now on.
void end_program();

// Runs Python's signal handlers, which act in the main thread only. What they raise stays set in
// this thread until raise_on_error() passes it on.
int python_interrupted();

// Text of the core, which may be cut within a character.
nb::object decoded(const char* text);

// What `body` returns, run without the lock.
template <class Body>
auto without_gil(Body&& body) {
  hsgd_error error;  // some hundred bytes, which are written when there is one
  int status = HSGD_OK;
  if constexpr (std::is_void_v<decltype(body())>) {
    {
      const ReleasedGil released;
      status = guarded(&error, body);
    }
    raise_on_error(status, error);
  } else {
    std::optional<decltype(body())> result;
    {
      const ReleasedGil released;
      status = guarded(&error, [&] { result.emplace(body()); });
    }
    raise_on_error(status, error);
    return std::move(*result);
  }
}

// The same for a function of the C interface, which takes where the error goes.
template <class Call>
void call_core(Call&& call) {
  hsgd_error error;
  int status = HSGD_OK;
  {
    const ReleasedGil released;
    status = call(&error);
  }
  raise_on_error(status, error);
}

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_ERRORS_HPP_
