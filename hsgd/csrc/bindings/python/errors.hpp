// Translates errors of the core to Python's exceptions; the only place that does so.
//
// Calls of the core go through here: they run without the GIL, and their errors are raised in
// Python.
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

// Throws the exception for a status of the core; does nothing for HSGD_OK.
void raise_on_error(int status, const hsgd_error& error);
// Throws the exception for "this WHAT is closed".
[[noreturn]] void raise_closed(const char* what);

// Called by the thread that ends the program: errors of other threads are no longer reported.
void end_program();

// Runs Python's signal handlers, which act in the main thread only. Their exception stays set in
// this thread until raise_on_error() passes it on.
int python_interrupted();

// Decodes text of the core, which may be cut within a character.
nb::object decoded(const char* text);

// Runs `body` without the GIL and returns its result.
template <class Body>
auto without_gil(Body&& body) {
  hsgd_error error;  // some hundred bytes, written only for an error
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

// Does the same for a function of the C interface with an error argument.
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
