// What the kernel below the native tests can do: an emulator of another processor has its own.
#ifndef HSGD_TESTS_KERNEL_HPP_
#define HSGD_TESTS_KERNEL_HPP_

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

namespace kernel {

// Whether huge pages can be switched off for a process; qemu-user 7.2 refuses.
inline bool switches_huge_pages() {
  const bool can = ::prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) >= 0;
  if (!can) std::puts("        (not asked: this kernel cannot switch huge pages off)");
  return can;
}

// Whether a forked child finds a page empty (MADV_WIPEONFORK); qemu-user 7.2 says so and does not.
inline bool wipes_on_fork() {
  const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* const mark = static_cast<volatile int*>(page);
  *mark = 1;
  ::madvise(page, bytes, MADV_WIPEONFORK);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(*mark);
  int status = 0;
  ::waitpid(child, &status, 0);
  ::munmap(page, bytes);
  if (status != 0) std::puts("        (not asked: this kernel does not wipe pages on fork)");
  return status == 0;
}

}  // namespace kernel

#endif  // HSGD_TESTS_KERNEL_HPP_
