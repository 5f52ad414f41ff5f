// A kernel with larger pages, as far as a program can tell: preload it, and give PAGE_BYTES.
//
// getpagesize() and sysconf() say so, and the calls that take addresses refuse what such a kernel
// refuses (EINVAL: addresses and offsets between its pages) and give addresses as it does. Only for
// tests on kernels whose own pages are smaller.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static size_t page_bytes(void) {
  static size_t bytes;
  if (bytes == 0) bytes = strtoul(getenv("PAGE_BYTES"), NULL, 10);
  return bytes;
}

static int is_between(uintptr_t value) { return value % page_bytes() != 0; }
static size_t whole(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

static int refuse(void) {
  errno = EINVAL;
  return -1;
}

int getpagesize(void) { return (int)page_bytes(); }

long sysconf(int name) {
  if (name == _SC_PAGESIZE) return (long)page_bytes();
  // Everything else is the C library's business, under its own name.
  extern long __sysconf(int);
  return __sysconf(name);
}

static void* map(void* wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return (void*)syscall(SYS_mmap, wanted, bytes, protection, flags, fd, offset);
}

// A range that begins where it should, with as much of the file in it as was asked for.
static void* map_anywhere(size_t bytes, int protection, int flags, int fd, off_t offset) {
  const size_t page = page_bytes();
  char* range =
      map(NULL, whole(bytes) + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return range;
  const size_t before = -(uintptr_t)range % page;
  if (before > 0) syscall(SYS_munmap, range, before);
  syscall(SYS_munmap, range + before + whole(bytes), page - before);
  void* made = map(range + before, bytes, protection, flags | MAP_FIXED, fd, offset);
  if (made == MAP_FAILED) {
    const int error = errno;
    syscall(SYS_munmap, range + before, whole(bytes));
    errno = error;
  }
  return made;
}

void* mmap(void* wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
  const int fixed = (flags & MAP_FIXED) != 0;
  if (bytes == 0 || is_between((uintptr_t)offset) || (fixed && is_between((uintptr_t)wanted))) {
    refuse();
    return MAP_FAILED;
  }
  if (fixed) return map(wanted, bytes, protection, flags, fd, offset);
  return map_anywhere(bytes, protection, flags, fd, offset);
}

void* mmap64(void* wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(wanted, bytes, protection, flags, fd, offset);
}

int munmap(void* address, size_t bytes) {
  if (is_between((uintptr_t)address)) return refuse();
  return (int)syscall(SYS_munmap, address, whole(bytes));
}

int mprotect(void* address, size_t bytes, int protection) {
  if (is_between((uintptr_t)address)) return refuse();
  return (int)syscall(SYS_mprotect, address, bytes, protection);
}

int madvise(void* address, size_t bytes, int advice) {
  if (is_between((uintptr_t)address)) return refuse();
  return (int)syscall(SYS_madvise, address, bytes, advice);
}
