// The C interface of libhsgd_io: rows of a file go to where a batch wants them, in one call.
//
// Owns the prototypes that io/reading/row_copies.py repeats for ctypes, which gives the GIL away
// for the length of a call. No state, no thread, no allocation: any thread may call anything.
#ifndef HSGD_IO_ROWS_H_
#define HSGD_IO_ROWS_H_

#include <stdint.h>

#define HSGD_IO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Why a task failed, besides errno values: the file ended before the rows did; a range does not
// have its checksum.
#define HSGD_IO_END (-1)
#define HSGD_IO_MISMATCH (-2)

// Some rows of one file, and where they go. A table of rows of `row_bytes` each begins at byte
// `offset` of the file; range i are its rows [starts[i], starts[i] + counts[i]). Their rows, one
// range after the other, go to `places`, or nowhere where that is 0. Places do not overlap. With
// checksums, range i is delivered only if checksums[i] is its CRC-32C.
//
// Without bases a place is an address. With bases it is row r, below 2^32, of batch b, written as
// ((b + 1) << 32) + r, whose address is bases[b] + base_offset + r * row_bytes: so one list of
// places serves all fields of some samples.
//
// With sizes the rows differ: the k-th of all has sizes[k] bytes, and range i is the counts[i] rows
// that begin, one after the other, starts[i] * row_bytes bytes behind `offset`.
// With memory the table is not in the file but there, `offset` bytes behind that address; it was
// checked when it came there.
struct hsgd_io_task {
  int64_t offset;
  int64_t row_bytes;
  int64_t ranges;
  const int64_t* starts;
  const int64_t* counts;
  const uint64_t* places;
  const uint64_t* bases;      // or NULL
  uint64_t base_offset;       // of this field in a batch
  const int64_t* sizes;       // or NULL; then bases is NULL
  const void* memory;         // or NULL
  const uint32_t* checksums;  // or NULL
  int64_t alignment;          // 1, or what O_DIRECT asks of offset, length and memory; a power of 2
  int32_t file;

  // Written by who does the task. status: 0, an errno value or one of the above.
  int32_t status;
  int64_t calls;     // to the system
  int64_t position;  // byte of the file at which the last call began
  int64_t slept;     // whether the thread gave its processor away meanwhile, as for a disk
};

// Tasks that several threads do together. next and finished begin with 0.
struct hsgd_io_batch {
  struct hsgd_io_task* tasks;
  int64_t count;
  int64_t next;      // the first task that nobody has taken
  int64_t finished;  // tasks that are done
};

// Takes tasks that no other thread has taken, and does them, until none is left. Returns 1 to the
// thread that finished the last of all tasks, and 0 to the others.
//
// staging: memory of this thread alone, aligned for all tasks and a multiple of that long, and at
// least twice that; with checksums it holds the longest range and twice the alignment.
HSGD_IO_API int hsgd_io_work(struct hsgd_io_batch* batch, void* staging, int64_t staging_bytes);

// Row i of `rows` rows that lie at `from`, one after the other, to address places[i], or nowhere.
// sizes: bytes of each row, or NULL when all have row_bytes.
HSGD_IO_API void hsgd_io_move_rows(const void* from, int64_t row_bytes, const int64_t* sizes,
                                   int64_t rows, const uint64_t* places);

// CRC-32C (Castagnoli; RFC 3720, B.4) of `count` bytes, going on from `crc`; begin with 0.
HSGD_IO_API uint32_t hsgd_io_crc32c(uint32_t crc, const void* bytes, int64_t count);

// A part of an image, and where it goes: pixels of 3 bytes, `row_pixels` to a row, become size x
// size pixels at `to`, mirrored with flip. The part lies inside the image; it need not begin or end
// where pixels do.
struct hsgd_io_crop {
  const uint8_t* pixels;
  int64_t row_pixels;
  double left;
  double top;
  double width;
  double height;
  int64_t size;
  int64_t flip;
  uint8_t* to;
};

// Scales the part. scratch: memory of `bytes` bytes, aligned to 8. Returns 0, or, having done
// nothing, how many bytes are needed where there are fewer.
HSGD_IO_API int64_t hsgd_io_crop_image(const struct hsgd_io_crop* crop, void* scratch,
                                       int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif  // HSGD_IO_ROWS_H_
