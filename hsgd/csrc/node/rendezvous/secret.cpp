#include "node/rendezvous/secret.hpp"

#include <sys/random.h>
#include <sys/types.h>

#include "core/base/error.hpp"

namespace hsgd {

void draw_random(void* out, size_t bytes) {
  if (::getrandom(out, bytes, 0) != static_cast<ssize_t>(bytes)) fail_system("getrandom");
}

bool is_same_secret(const void* one, const void* other, size_t bytes) {
  const auto* left = static_cast<const unsigned char*>(one);
  const auto* right = static_cast<const unsigned char*>(other);
  volatile unsigned char difference = 0;  // volatile: no compiler ends the loop early
  for (size_t i = 0; i < bytes; ++i) {
    difference = static_cast<unsigned char>(difference | (left[i] ^ right[i]));
  }
  return difference == 0;
}

}  // namespace hsgd
