// A test runner in one header, for the native tests: each tests/native/test_*.cpp includes it once
// and is one program.
//
//   TEST("a sentence that says what holds") {
//     CHECK(condition);
//     CHECK_EQ(left, right);
//     CHECK_THROWS(statement, "part of the message");
//   }
//
// Checks may be made from any thread and never end the test: they return whether they held. The
// program runs all tests, or those whose sentence contains its first argument, and exits with 1
// when a check failed. Owns no time-outs: whoever starts the program does.
#ifndef HSGD_TESTS_CHECK_HPP_
#define HSGD_TESTS_CHECK_HPP_

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* sentence;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

inline bool add(const char* sentence, void (*run)()) {
  cases().push_back({sentence, run});
  return true;
}

inline bool report(bool held, const char* file, int line, const std::string& what) {
  constexpr int kMostPrinted = 20;  // of a whole run: the first ones tell
  if (!held && failures().fetch_add(1) < kMostPrinted) {
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  }
  return held;
}

template <typename A, typename B>
bool report_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  if (a == b) return true;
  std::ostringstream text;
  text << what << ": " << a << " is not " << b;
  return report(false, file, line, text.str());
}

template <typename F>
bool report_throws(F&& statement, const char* part, const char* file, int line, const char* what) {
  try {
    statement();
  } catch (const std::exception& error) {
    const bool named = std::strstr(error.what(), part) != nullptr;
    return report(named, file, line, std::string(what) + " threw: " + error.what());
  }
  return report(false, file, line, std::string(what) + " threw nothing");
}

inline int run_all(const char* filter) {
  int ran = 0;
  for (const Case& test : cases()) {
    if (std::strstr(test.sentence, filter) == nullptr) continue;
    const int before = failures().load();
    try {
      test.run();
    } catch (const std::exception& error) {
      report(false, test.sentence, 0, std::string("threw ") + error.what());
    }
    std::printf("%s  %s\n", failures().load() == before ? "ok    " : "FAILED", test.sentence);
    std::fflush(stdout);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, failures().load());
  return ran > 0 && failures().load() == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition) \
  ::check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) ::check::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
// The statement throws a std::exception whose text contains `part`.
#define CHECK_THROWS(statement, part) \
  ::check::report_throws([&] { statement; }, (part), __FILE__, __LINE__, #statement)

#define CHECK_NAME_(prefix, line) prefix##line
#define CHECK_TEST_(sentence, line)                              \
  static void CHECK_NAME_(test_, line)();                        \
  [[maybe_unused]] static const bool CHECK_NAME_(added_, line) = \
      ::check::add(sentence, CHECK_NAME_(test_, line));          \
  static void CHECK_NAME_(test_, line)()
#define CHECK_EXPAND_(sentence, line) CHECK_TEST_(sentence, line)
#define TEST(sentence) CHECK_EXPAND_(sentence, __LINE__)

int main(int argc, char** argv) { return check::run_all(argc > 1 ? argv[1] : ""); }

#endif  // HSGD_TESTS_CHECK_HPP_
