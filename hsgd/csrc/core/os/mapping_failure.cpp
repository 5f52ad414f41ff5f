// Reads the limits and finds the one that was reached.
#include "core/os/mapping_failure.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <string>

#include "core/base/error.hpp"
#include "core/os/kernel_file.hpp"
#include "core/os/page.hpp"

namespace hsgd {
namespace {

unsigned long long lines_in(const char* path) {
  unsigned long long lines = 0;
  if (std::FILE* file = std::fopen(path, "re")) {
    for (int c; (c = std::fgetc(file)) != EOF;) lines += c == '\n' ? 1 : 0;
    std::fclose(file);
  }
  return lines;
}

std::string explain(size_t bytes, size_t left) {
  const unsigned long long mapped = number_in("/proc/self/statm", 0) * page_bytes();
  const unsigned long long mappings = lines_in("/proc/self/maps");
  const unsigned long long most = number_in("/proc/sys/vm/max_map_count", 0);
  rlimit addresses{};
  ::getrlimit(RLIMIT_AS, &addresses);
  const bool limited = addresses.rlim_cur != RLIM_INFINITY;
  const std::string limit =
      limited ? text("%llu", static_cast<unsigned long long>(addresses.rlim_cur)) : "unlimited";
  const bool too_large =
      limited && (bytes > addresses.rlim_cur || mapped > addresses.rlim_cur - bytes);
  const bool too_many = most != 0 && mappings + 2 >= most;
  return text(
      "this process has mapped %llu bytes (ulimit -v: %s) in %llu mappings "
      "(vm.max_map_count: %llu), and %zu bytes of memory are left; %s",
      mapped, limit.c_str(), mappings, most, left,
      too_large  ? "raise ulimit -v"
      : too_many ? "raise vm.max_map_count, or close communicators"
                 : "ask for less, or close communicators");
}

}  // namespace

void fail_mapping(const char* what, size_t bytes, size_t (*available)(const std::string& root)) {
  const int code = errno;
  const std::string begin =
      text("%s: mapping %zu bytes failed: %s", what, bytes, std::strerror(code));
  // EAGAIN: the limit on locked memory, if the program locks all that it maps.
  if (code != ENOMEM && code != EAGAIN) throw Error(HSGD_ERR_SYSTEM, -1, begin);
  throw Error(
      HSGD_ERR_MEMORY, -1,
      begin + (code == EAGAIN ? "; raise ulimit -l" : "; " + explain(bytes, available(""))));
}

}  // namespace hsgd
