// Error: the core's exception, with a status code, the rank that it is about and one line for the
// user. Broken invariants (HSGD_CHECK) are bugs of hsgd and abort the process.
#ifndef HSGD_CORE_BASE_ERROR_HPP_
#define HSGD_CORE_BASE_ERROR_HPP_

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "hsgd_core.h"

namespace hsgd {

class HSGD_API Error : public std::exception {
 public:
  Error(hsgd_status code, int rank, std::string message)
      : code_(code), rank_(rank), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  hsgd_status code() const { return code_; }
  int rank() const { return rank_; }

 private:
  hsgd_status code_;
  int rank_;  // its name in errors (core/base/rank_names.hpp), or -1
  std::string message_;
};

// HSGD_ERR_SIGNATURE: the calls of two ranks do not match.
class HSGD_API MismatchError final : public Error {
 public:
  MismatchError(int rank, std::string message, const hsgd_side& one, const hsgd_side& other)
      : Error(HSGD_ERR_SIGNATURE, rank, std::move(message)), sides_{one, other} {}
  const hsgd_side (&sides() const)[2] { return sides_; }

 private:
  hsgd_side sides_[2];
};

inline std::string text_of(const char* format, va_list arguments) {
  char buffer[1024];
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  return buffer;
}

__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const std::string made = text_of(format, arguments);
  va_end(arguments);
  return made;
}

[[noreturn]] __attribute__((format(printf, 3, 4))) inline void throw_error(hsgd_status code,
                                                                           int rank,
                                                                           const char* format,
                                                                           ...) {
  va_list arguments;
  va_start(arguments, format);
  const Error error(code, rank, text_of(format, arguments));
  va_end(arguments);
  throw error;
}

// Throws HSGD_ERR_ARGUMENT, about no rank.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void throw_invalid(const char* format,
                                                                             ...) {
  va_list arguments;
  va_start(arguments, format);
  const Error error(HSGD_ERR_ARGUMENT, -1, text_of(format, arguments));
  va_end(arguments);
  throw error;
}

// Returns text that another process wrote, which may hold any bytes: at most `most` bytes, on one
// line.
inline std::string foreign_words(const char* bytes, size_t most) {
  std::string words(bytes, ::strnlen(bytes, most));
  for (char& letter : words) {
    if (static_cast<unsigned char>(letter) < ' ' || letter == '\x7f') letter = ' ';
  }
  return words;
}

// Returns the error that other ranks are told after `error` on the rank with the name `rank`. An
// interruption becomes HSGD_ERR_PEER_LOST.
inline Error for_others(const Error& error, int rank) {
  if (error.code() != HSGD_ERR_INTERRUPTED) return error;
  const std::string what = error.what();
  const bool says_who = what.find("rank ") != std::string::npos;
  return Error(HSGD_ERR_PEER_LOST, rank, says_who ? what : what + text(" (rank %d)", rank));
}

// Returns the result of `step`. If it throws, calls `give_up` with the error first, then rethrows.
// An exception other than Error, most likely out of memory, is passed as HSGD_ERR_SYSTEM of `rank`,
// which is a name.
template <class Step, class GiveUp>
auto or_give_up(int rank, Step&& step, GiveUp&& give_up) {
  try {
    return step();
  } catch (const Error& error) {
    give_up(error);
    throw;
  } catch (const std::exception& error) {
    give_up(Error(HSGD_ERR_SYSTEM, rank, error.what()));
    throw;
  }
}

[[noreturn]] inline void fail_system(const char* what) {
  const int code = errno;
  throw_error(HSGD_ERR_SYSTEM, -1, "%s failed: %s", what, std::strerror(code));
}

}  // namespace hsgd

#define HSGD_CHECK(condition)                                                           \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "hsgd: broken invariant at %s:%d: %s\n", __FILE__, __LINE__, \
                   #condition);                                                         \
      std::abort();                                                                     \
    }                                                                                   \
  } while (0)

#endif  // HSGD_CORE_BASE_ERROR_HPP_
