// Lossy forms of float32 vectors in host memory, with error feedback: int8 with a scale per block,
// and the largest values of each chunk.
//
// Owns the loops. Never allocates but for one chunk, and never waits. What is left out of a message
// stays in `error`, and goes into the next one, so that nothing is lost in the long run. Decoding
// gives the same bits on every machine. A value that is not finite makes what it is decoded to not
// finite either.
//
// Sources: error feedback, Seide et al., Interspeech 2014, and Karimireddy et al.,
// arXiv:1901.09847; chunks with a decay of the error, SparseLoCo, arXiv:2508.15706.
#ifndef HSGD_CORE_KERNELS_COMPRESSION_HPP_
#define HSGD_CORE_KERNELS_COMPRESSION_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// A vector of `count` values in blocks of `block`, of which the last may be shorter: scales[b] is
// the greatest |value| of block b / 127, and a value is codes[i] * scales[b], to the nearest.
struct Int8Blocks {
  int8_t* codes;
  float* scales;
  uint64_t count;
  uint64_t block;
};

// Codes of values + error, and what is left in `error`.
HSGD_API void int8_encode(const float* values, float* error, const Int8Blocks& to);
// sum += factor * what the codes stand for.
HSGD_API void int8_decode(const Int8Blocks& from, float factor, float* sum);

// Of each chunk of `chunk` values, up to 65536, the `kept` with the greatest magnitude, or all of a
// last chunk that has no more; of equals the first. `places` are within the chunk, rising; `values`
// are bfloat16. Both have kept * chunks elements; those that a last chunk leaves over are 0.
struct TopValues {
  uint16_t* places;
  uint16_t* values;
  uint64_t count;
  uint64_t chunk;
  uint64_t kept;
};

// Of values + decay * error, and what is left in `error`.
HSGD_API void top_encode(const float* values, float* error, float decay, const TopValues& to);
// sum += factor * the values at their places.
HSGD_API void top_decode(const TopValues& from, float factor, float* sum);

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_COMPRESSION_HPP_
