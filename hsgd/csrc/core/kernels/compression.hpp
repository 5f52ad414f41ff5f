// Lossy compression of float32 vectors in host memory, with error feedback: int8 with a scale per
// block, or the largest values of each chunk.
//
// Allocates memory for one chunk at most; never waits. What a message leaves out stays in `error`
// and goes into the next one, so nothing is lost in the long run. Decoding gives the same bits on
// every machine. A value that is not finite is decoded to a value that is not finite.
//
// Sources: error feedback, Seide et al., Interspeech 2014, and Karimireddy et al.,
// arXiv:1901.09847; chunks with a decay of the error, SparseLoCo, arXiv:2508.15706.
#ifndef HSGD_CORE_KERNELS_COMPRESSION_HPP_
#define HSGD_CORE_KERNELS_COMPRESSION_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// A vector of `count` values in blocks of `block` elements; the last block may be shorter.
// scales[b] is the greatest |value| of block b / 127; a value is codes[i] * scales[b], rounded to
// nearest.
struct Int8Blocks {
  int8_t* codes;
  float* scales;
  uint64_t count;
  uint64_t block;
};

// Writes the codes of values + error to `to`, and the remainder to `error`.
HSGD_API void int8_encode(const float* values, float* error, const Int8Blocks& to);
// Adds factor * the decoded values to `sum`.
HSGD_API void int8_decode(const Int8Blocks& from, float factor, float* sum);

// The `kept` values with the greatest magnitude of each chunk of `chunk` values (up to 65536); all
// values of the last chunk if it has no more. Of equal values the first is kept. `places` are
// positions in the chunk, ascending; `values` are bfloat16. Both have kept * chunks elements;
// elements that the last chunk does not need are 0.
struct TopValues {
  uint16_t* places;
  uint16_t* values;
  uint64_t count;
  uint64_t chunk;
  uint64_t kept;
};

// Writes the top values of values + decay * error to `to`, and the remainder to `error`.
HSGD_API void top_encode(const float* values, float* error, float decay, const TopValues& to);
// Adds factor * each value to its place in `sum`.
HSGD_API void top_decode(const TopValues& from, float factor, float* sum);

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_COMPRESSION_HPP_
