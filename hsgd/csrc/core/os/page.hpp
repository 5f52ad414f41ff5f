// The page size of the kernel: 4, 16 or 64 KiB.
#ifndef HSGD_CORE_OS_PAGE_HPP_
#define HSGD_CORE_OS_PAGE_HPP_

#include <unistd.h>

#include <cstddef>

namespace hsgd {

// Returns the page size; an address given to mmap() is a multiple of it.
inline size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace hsgd

#endif  // HSGD_CORE_OS_PAGE_HPP_
