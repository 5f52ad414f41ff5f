// fail_mapping(): explains why the kernel cannot map more memory: the bytes asked for, the limits
// of this process and their use, and a remedy.
#ifndef HSGD_CORE_OS_MAPPING_FAILURE_HPP_
#define HSGD_CORE_OS_MAPPING_FAILURE_HPP_

#include <cstddef>
#include <string>

namespace hsgd {

// Throws the error of errno after mmap() has failed, HSGD_ERR_MEMORY if something ran out. Call it
// at once after mmap(). `what`: name of what was to be mapped. `available`: returns the bytes of
// memory that are left; see core/os/shared_memory.hpp.
[[noreturn]] void fail_mapping(const char* what, size_t bytes,
                               size_t (*available)(const std::string& root));

}  // namespace hsgd

#endif  // HSGD_CORE_OS_MAPPING_FAILURE_HPP_
