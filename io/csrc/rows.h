// The C interface of libhsgd_io: moves rows of a file to their places in a batch, in one call,
// undoes filters, and finds arrays in files with many groups.
//
// io/native_library.py repeats these prototypes for ctypes, which releases the GIL during a
// call. No state, no thread, no allocation: any thread may call any function.
#ifndef HSGD_IO_ROWS_H_
#define HSGD_IO_ROWS_H_

#include <stdint.h>

#define HSGD_IO_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// The reasons of a failed task, besides errno values: the file ended before the rows did; a range
// has a wrong checksum.
#define HSGD_IO_END (-1)
#define HSGD_IO_MISMATCH (-2)

// Some rows of one file, and their places. A table of rows of `row_bytes` each begins at byte
// `offset` of the file; range i is its rows [starts[i], starts[i] + counts[i]). The rows of all
// ranges, one after the other, go to `places`; a row with place 0 is skipped. Places do not
// overlap. With checksums, range i is delivered only if checksums[i] is its CRC-32C.
//
// Without bases a place is an address. With bases it is row r, below 2^32, of batch b, written as
// ((b + 1) << 32) + r; its address is bases[b] + base_offset + r * row_bytes. So one list of places
// serves all fields of some samples.
//
// With sizes the rows differ: the k-th of all rows has sizes[k] bytes, and range i is the counts[i]
// consecutive rows that begin starts[i] * row_bytes bytes behind `offset`. With memory the table is
// not in the file but in memory, `offset` bytes behind that address; it was checked when it was
// stored there.
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
  int64_t alignment;  // 1, or the alignment that O_DIRECT needs for offset, length and memory; a
                      // power of 2
  int32_t file;

  // Written by the thread that does the task. status: 0, an errno value or one of the above.
  int32_t status;
  int64_t calls;     // system calls
  int64_t position;  // byte of the file at which the last call began
  int64_t slept;     // whether the thread slept meanwhile, as for a disk
};

// Tasks that several threads share. next and finished begin with 0.
struct hsgd_io_batch {
  struct hsgd_io_task* tasks;
  int64_t count;
  int64_t next;      // the first task that no thread has taken
  int64_t finished;  // tasks that are done
};

// Takes tasks that no other thread has taken, and does them, until none is left. Returns 1 to the
// thread that finished the last of all tasks, and 0 to the others.
//
// staging: memory of this thread alone, aligned for all tasks; its length is a multiple of that
// alignment and at least twice that; with checksums it holds the longest range and twice the
// alignment.
HSGD_IO_API int hsgd_io_work(struct hsgd_io_batch* batch, void* staging, int64_t staging_bytes);

// Copies row i of `rows` consecutive rows at `from` to address places[i], or nowhere if that is 0.
// sizes: bytes of each row, or NULL if all have row_bytes.
HSGD_IO_API void hsgd_io_move_rows(const void* from, int64_t row_bytes, const int64_t* sizes,
                                   int64_t rows, const uint64_t* places);

// Returns the CRC-32C (Castagnoli; RFC 3720, B.4) of `count` bytes, continued from `crc`; begin
// with 0.
HSGD_IO_API uint32_t hsgd_io_crc32c(uint32_t crc, const void* bytes, int64_t count);

// A part of an image, and its destination: pixels of 3 bytes, `row_pixels` to a row, become size x
// size pixels at `to`, mirrored with flip. The part is inside the image; it need not begin or end
// at whole pixels.
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

// Scales the part. scratch: memory of `bytes` bytes, aligned to 8. Returns 0; if `bytes` is too
// small, does nothing and returns the bytes needed.
HSGD_IO_API int64_t hsgd_io_crop_image(const struct hsgd_io_crop* crop, void* scratch,
                                       int64_t bytes);

// The functions below undo filters of HDF5 from memory to memory. Input may be damaged: none of
// them reads or writes beyond the sizes that it is given.

// Decompresses LZF (liblzf's stream) to at most `room` bytes. Returns how many, -1 if `from` is
// damaged or needs more room.
HSGD_IO_API int64_t hsgd_io_lzf(const void* from, int64_t size, void* to, int64_t room);

// Returns the Fletcher-32 checksum of `size` bytes, as HDF5 computes it.
HSGD_IO_API uint32_t hsgd_io_fletcher32(const void* from, int64_t size);

// Undoes the shuffle filter: plane k of `from` has byte k of every item of `item` bytes. Bytes
// after the last whole item are copied.
HSGD_IO_API void hsgd_io_unshuffle(const void* from, int64_t size, int64_t item, void* to);

// The functions below read the headers of HDF5 objects in a file with a group for each sample. The
// file may be damaged; nothing outside of it, and of the memory given, is read or written. What
// they do not know is left to HDF5.

// A step on the way from the group of a sample to its arrays. Steps of one group follow one
// another.
struct hsgd_io_step {
  int64_t parent;  // the step before, which is a lower one; -1 for the group of the sample
  int64_t field;   // the array to which it leads; -1 if it is a group
  const char* name;
  int64_t name_bytes;
};

// Where arrays lie: array f of sample s of n is number f * n + s.
struct hsgd_io_places {
  int64_t* positions;
  int64_t* sizes;   // as stored
  uint32_t* masks;  // bit n is set if the n-th filter was not applied
  int64_t* rows;    // length of the first axis; 1 without axes
};

// What is to be found in each group. The header of an array must have the form given, in which
// neither the place of an array nor the length of its first axis is fixed.
struct hsgd_io_forms {
  int64_t file;  // a descriptor
  int64_t file_bytes;
  int64_t step_count;
  const struct hsgd_io_step* steps;
  int64_t field_count;
  const void* const* forms;
  const int64_t* form_bytes;
  const char* valued;  // as for the forms
};

// Writes the form of the dataset at `address`, and its place. Returns the bytes of the form; 0 if
// HDF5 must read it, or if they are more than `room`. valued: names of the attributes whose values
// are part of the form, each ended by 0, and an empty one.
HSGD_IO_API int64_t hsgd_io_array_form(int file, int64_t file_bytes, uint64_t address,
                                       const char* valued, void* form, int64_t room,
                                       const struct hsgd_io_places* place);

// Finds the arrays of the groups at `count` addresses. found[s] is 1 for a sample with all arrays,
// each stored in one piece or in one chunk inside the file; 0 if HDF5 must look.
HSGD_IO_API void hsgd_io_find_arrays(const struct hsgd_io_forms* forms, const uint64_t* groups,
                                     int64_t count, uint8_t* found,
                                     const struct hsgd_io_places* places);

#ifdef __cplusplus
}
#endif

#endif  // HSGD_IO_ROWS_H_
