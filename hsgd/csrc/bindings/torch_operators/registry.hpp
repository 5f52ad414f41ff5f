// The communicators that torch's operators know, by number: an operator takes numbers, not objects.
//
// Owns a share of each, so that one that is closed lives on until the operators that use it have
// ended. The process has one registry, as it has one torch. Never numbers anything: Python does.
#ifndef HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_
#define HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_

#include <cstdint>
#include <memory>

#include "hsgd_core.h"

namespace hsgd::operators {

// Throws std::runtime_error where none has the number, or it was closed. Any thread may call it.
std::shared_ptr<hsgd_comm> comm_of(int64_t number);

}  // namespace hsgd::operators

extern "C" {

// comm: a std::shared_ptr<hsgd_comm>, which is copied. Zero; -1 where there is no memory for it.
HSGD_API int hsgd_operators_keep(int64_t number, const void* comm);
HSGD_API void hsgd_operators_forget(int64_t number);
}

#endif  // HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_
