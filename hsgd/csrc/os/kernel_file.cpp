// Reading.
#include "os/kernel_file.hpp"

#include <cstdio>

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

}  // namespace hsgd
