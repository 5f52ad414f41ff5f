// The C interface of libhsgd_io: rows of a file go to where a batch wants them, in one call.
//
// Owns the prototypes that hsgd/io/native.py repeats for ctypes, which gives the GIL away for the
// length of a call. No state, no thread, no allocation: any thread may call anything.
#ifndef HSGD_IO_ROWS_H_
#define HSGD_IO_ROWS_H_

#include <stdint.h>

#define HSGD_IO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// The file ended before the rows did; other results of hsgd_io_read_rows are 0 and errno values.
#define HSGD_IO_END (-1)

// Which rows of a file, and where they go. A table of rows of `row_bytes` each begins at byte
// `offset` of the file; range i are its rows [starts[i], starts[i] + counts[i]). Their rows, one
// range after the other, go to the addresses `places`, or nowhere where that is 0. Places do not
// overlap.
struct hsgd_io_ranges {
  int64_t offset;
  int64_t row_bytes;
  int64_t count;
  const int64_t* starts;
  const int64_t* counts;
  const uint64_t* places;
};

// How to read. alignment: 1, or what O_DIRECT asks of offset, length and memory, a power of two.
// staging: memory aligned to it, a multiple of it long, at least twice of it.
struct hsgd_io_method {
  void* staging;
  int64_t staging_bytes;
  int64_t alignment;
};

// What a call did: system calls, and where it stopped when it failed (a byte of the file).
struct hsgd_io_outcome {
  int64_t calls;
  int64_t position;
};

HSGD_IO_API int hsgd_io_read_rows(int file, const struct hsgd_io_ranges* ranges,
                                  const struct hsgd_io_method* method,
                                  struct hsgd_io_outcome* outcome);

// The same for `rows` rows that lie at `from`, one after the other.
HSGD_IO_API void hsgd_io_move_rows(const void* from, int64_t row_bytes, int64_t rows,
                                   const uint64_t* places);

// CRC-32C (Castagnoli; RFC 3720, B.4) of `count` bytes, going on from `crc`; begin with 0.
HSGD_IO_API uint32_t hsgd_io_crc32c(uint32_t crc, const void* bytes, int64_t count);

#ifdef __cplusplus
}
#endif

#endif  // HSGD_IO_ROWS_H_
