// A folder that stands for the root of another machine, with files of /proc and /sys.
//
// Owns the folder, which is gone with the object. Knows no file by name.
#ifndef HSGD_TESTS_FAKE_ROOT_HPP_
#define HSGD_TESTS_FAKE_ROOT_HPP_

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

class FakeRoot {
 public:
  FakeRoot() {
    path_ = (std::filesystem::temp_directory_path() / "hsgd-test-XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = path_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void remove(const std::string& path) { std::filesystem::remove_all(path_ + path); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

#endif  // HSGD_TESTS_FAKE_ROOT_HPP_
