// Why the kernel maps no more, in numbers.
//
// Owns the wording: how much was wanted, which limits of this process there are and how far they
// are used, and what to do. Never changes a limit.
#ifndef HSGD_CORE_OS_MAPPING_FAILURE_HPP_
#define HSGD_CORE_OS_MAPPING_FAILURE_HPP_

#include <cstddef>
#include <string>

namespace hsgd {

// Call at once after mmap() has failed: throws what errno says, HSGD_ERR_MEMORY for too little of
// something. `what` was to be mapped.
// `available`: tells the bytes of memory that are left; see core/os/shared_memory.hpp.
[[noreturn]] void fail_mapping(const char* what, size_t bytes,
                               size_t (*available)(const std::string& root));

}  // namespace hsgd

#endif  // HSGD_CORE_OS_MAPPING_FAILURE_HPP_
