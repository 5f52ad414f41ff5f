// Random bytes that nobody can guess, and their comparison: what proves that a process was told.
#ifndef HSGD_NODE_RENDEZVOUS_SECRET_HPP_
#define HSGD_NODE_RENDEZVOUS_SECRET_HPP_

#include <cstddef>

namespace hsgd {

// Fills `bytes` bytes from the kernel's source; at most 256. Throws when the kernel gives none.
void draw_random(void* out, size_t bytes);

// Looks at every byte, so that its time says nothing about how many were right.
bool is_same_secret(const void* one, const void* other, size_t bytes);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_SECRET_HPP_
