// Reads small files of /proc and /sys as a whole, and the names in their folders. A missing file or
// folder is empty.
#ifndef HSGD_CORE_OS_KERNEL_FILE_HPP_
#define HSGD_CORE_OS_KERNEL_FILE_HPP_

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace hsgd {

// Returns "" if there is no such file. A child that another thread starts meanwhile does not
// inherit the file.
std::istringstream contents_of(const std::string& path);

// Returns the first number, or `fallback` if the file is missing or begins with something else
// ("max").
uint64_t number_in(const std::string& path, uint64_t fallback);

// Returns the names in a folder, sorted; none if there is no such folder.
std::vector<std::string> names_in(const std::string& folder);

}  // namespace hsgd

#endif  // HSGD_CORE_OS_KERNEL_FILE_HPP_
