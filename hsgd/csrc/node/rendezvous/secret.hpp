// Random bytes that cannot be guessed, and their comparison. A secret proves that a process got the
// path.
#ifndef HSGD_NODE_RENDEZVOUS_SECRET_HPP_
#define HSGD_NODE_RENDEZVOUS_SECRET_HPP_

#include <cstddef>

namespace hsgd {

// Fills `bytes` bytes (at most 256) from the kernel's random source. Throws if it fails.
void draw_random(void* out, size_t bytes);

// Compares every byte, so that the time does not show how many were right.
bool is_same_secret(const void* one, const void* other, size_t bytes);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_SECRET_HPP_
