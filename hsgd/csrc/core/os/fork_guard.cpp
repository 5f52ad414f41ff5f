// Maps the page that a forked child finds empty.
#include "core/os/fork_guard.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include "core/base/error.hpp"
#include "core/os/page.hpp"

namespace hsgd {
Owner::Owner() : pid_(::getpid()) {
  void* page =
      ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail_system("mapping of a page");
  mark_ = static_cast<volatile int*>(page);
  *mark_ = 1;
  if (::madvise(page, page_bytes(), MADV_WIPEONFORK) != 0) {
    ::munmap(page, page_bytes());
    fail_system("madvise(MADV_WIPEONFORK), which needs Linux 4.14,");
  }
}

Owner::~Owner() { ::munmap(const_cast<int*>(mark_), page_bytes()); }

}  // namespace hsgd
