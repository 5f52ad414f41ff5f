// Defaults of hsgd_options, and the HSGD_* variables that change them. No other native code calls
// getenv, but for the plugin that NCCL loads.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "core/base/error.hpp"
#include "core/base/status.hpp"
#include "hsgd_core.h"

namespace hsgd {
namespace {

[[noreturn]] void refuse(const char* variable, const char* value, const char* expected) {
  throw_invalid("%s=%s: expected %s", variable, value, expected);
}

// Sets `field` from the variable if it is set and not empty.
template <class Number>
void read_number(const char* variable, Number& field, double least, double most,
                 const char* expected) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return;
  char* end = nullptr;
  errno = 0;
  const double number = std::strtod(value, &end);
  // Allows no spaces and no hexadecimals, and only digits for whole numbers, as hsgd/config.py
  // does.
  const char* allowed = std::is_same_v<Number, double> ? "0123456789+-.eE" : "0123456789+-";
  const bool formed = value[std::strspn(value, allowed)] == '\0';
  if (errno != 0 || *end != '\0' || !formed || !(number >= least && number <= most)) {
    refuse(variable, value, expected);
  }
  field = static_cast<Number>(number);
}

struct Word {
  const char* word;
  uint32_t value;
};

void read_word(const char* variable, uint32_t& field, std::initializer_list<Word> words,
               const char* expected) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return;
  for (const Word& choice : words) {
    if (std::strcmp(text, choice.word) != 0) continue;
    field = choice.value;
    return;
  }
  refuse(variable, text, expected);
}

void read_environment(hsgd_options& options) {
  const char* timeout = std::getenv("HSGD_TIMEOUT_S");
  options.timeout_given = timeout != nullptr && *timeout != '\0' ? 1 : 0;
  read_number("HSGD_TIMEOUT_S", options.timeout_s, 1e-3, 1e9, "seconds from 0.001 to 1e9");
  read_number("HSGD_ONESHOT_BYTES", options.oneshot_bytes, -1, 1 << 20,
              "bytes from 0 to 1048576, -1 to choose");
  read_number("HSGD_CHUNK_BYTES", options.chunk_bytes, -1, 1 << 28,
              "bytes from 4096 to 268435456, -1 to choose");
  if (options.chunk_bytes >= 0 && options.chunk_bytes < 4096) {
    refuse("HSGD_CHUNK_BYTES", std::getenv("HSGD_CHUNK_BYTES"),
           "bytes from 4096 to 268435456, -1 to choose");
  }
  read_number("HSGD_WIRE_ONESHOT_BYTES", options.wire_oneshot_bytes, 0, 1 << 20,
              "bytes from 0 to 1048576");
  read_number("HSGD_WIRE_CHUNK_BYTES", options.wire_chunk_bytes, 0, 1 << 28,
              "bytes from 0 to 268435456");
  read_number("HSGD_WIRE_RADIX", options.wire_radix, 2, 64, "a whole number from 2 to 64");
  read_number("HSGD_FLAT_RANKS", options.flat_ranks, 1, 1024, "a whole number from 1 to 1024");
  read_number("HSGD_NEAR_NIC", options.near_nic, -1, 1024,
              "an adapter's number from 1 to 1024, 0 for none, -1 to ask the kernel");
  read_number("HSGD_SLOTS", options.slots, 3, 64, "a whole number from 3 to 64");
  read_number("HSGD_SPIN", options.spin, -1, 1e9, "iterations, 0 to yield at once, -1 to choose");
  read_number("HSGD_MIN_BYTES", options.min_bytes, 0, 1e15, "bytes from 0");
  read_number("HSGD_REPORT", options.report, 0, 1, "0 or 1");
  read_word("HSGD_STORE", options.nontemporal, {{"ordinary", 0}, {"nontemporal", 1}, {"auto", 2}},
            "ordinary, nontemporal or auto");
  read_word("HSGD_WIRE_DTYPE", options.wire_dtype,
            {{"none", 0}, {"bfloat16", HSGD_BFLOAT16}, {"float16", HSGD_FLOAT16}},
            "none, bfloat16 or float16");
}

}  // namespace
}  // namespace hsgd

void hsgd_options_default(hsgd_options* options) {
  *options = hsgd_options{};
  options->struct_bytes = sizeof(hsgd_options);
  options->nontemporal = 2;
  options->timeout_s = 1800;
  options->oneshot_bytes = -1;
  options->chunk_bytes = -1;
  options->wire_oneshot_bytes = 32 << 10;
  options->wire_chunk_bytes = 0;
  options->wire_radix = 16;
  options->flat_ranks = 16;
  options->near_nic = -1;
  options->slots = 4;
  options->spin = -1;
  options->min_bytes = 1024;
  options->report = 0;
}

int hsgd_options_from_env(hsgd_options* options, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    hsgd_options_default(options);
    hsgd::read_environment(*options);
  });
}
