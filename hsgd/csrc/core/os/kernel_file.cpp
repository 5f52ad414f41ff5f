// Reads files and folders.
#include "core/os/kernel_file.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <system_error>

namespace hsgd {

std::istringstream contents_of(const std::string& path) {
  std::string text;
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    char part[1024];
    while (const size_t got = std::fread(part, 1, sizeof part, file)) text.append(part, got);
    std::fclose(file);
  }
  return std::istringstream(text);
}

uint64_t number_in(const std::string& path, uint64_t fallback) {
  std::istringstream file = contents_of(path);
  uint64_t value = 0;
  return file >> value ? value : fallback;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;  // no exceptions: after a failure the iterator is at its end
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator entry(folder, error); entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace hsgd
