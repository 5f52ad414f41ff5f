// The page size of the kernel: 4, 16 or 64 KiB. Owns the question.
#ifndef HSGD_CORE_OS_PAGE_HPP_
#define HSGD_CORE_OS_PAGE_HPP_

#include <unistd.h>

#include <cstddef>

namespace hsgd {

// What is mapped to a given address is a multiple of it.
inline size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace hsgd

#endif  // HSGD_CORE_OS_PAGE_HPP_
