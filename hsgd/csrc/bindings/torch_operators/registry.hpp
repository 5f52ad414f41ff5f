// The communicators of torch's operators, by number: an operator takes numbers, not objects.
//
// Owns a share of each, so that a closed one lives on until the operators that use it have ended.
// The process has one registry, as it has one torch. Python assigns the numbers.
#ifndef HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_
#define HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_

#include <cstdint>
#include <memory>

#include "hsgd_core.h"

namespace hsgd::operators {

// Returns the communicator with this number. Throws std::runtime_error if there is none or it was
// closed. Any thread may call it.
std::shared_ptr<hsgd_comm> comm_of(int64_t number);

}  // namespace hsgd::operators

extern "C" {

// Registers a communicator. `comm` points to a std::shared_ptr<hsgd_comm>; it is copied. Returns 0,
// or -1 if out of memory.
HSGD_API int hsgd_operators_keep(int64_t number, const void* comm);
HSGD_API void hsgd_operators_forget(int64_t number);
}

#endif  // HSGD_BINDINGS_TORCH_OPERATORS_REGISTRY_HPP_
