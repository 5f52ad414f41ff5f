// Small files of /proc and /sys, whole, and the names in their folders.
//
// Owns reading them: what is not there is empty. Never writes, and knows no file by name.
#ifndef HSGD_CORE_OS_KERNEL_FILE_HPP_
#define HSGD_CORE_OS_KERNEL_FILE_HPP_

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace hsgd {

// "" where there is no such file. No child that another thread starts meanwhile inherits it.
std::istringstream contents_of(const std::string& path);

// The first number, or `fallback` when the file is missing or begins with something else ("max").
uint64_t number_in(const std::string& path, uint64_t fallback);

// What lies in a folder, sorted; nothing where there is no such folder.
std::vector<std::string> names_in(const std::string& folder);

}  // namespace hsgd

#endif  // HSGD_CORE_OS_KERNEL_FILE_HPP_
