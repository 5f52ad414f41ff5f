// The C interface of libhsgd_io to filters of HDF5: undoes them, from memory to memory.
//
// io/native_library.py repeats these prototypes for ctypes, which releases the GIL during a call.
// No state, no allocation: any thread may call any function. Input may be damaged; no function
// reads or writes beyond the sizes that it is given.
#ifndef HSGD_IO_FILTERS_H_
#define HSGD_IO_FILTERS_H_

#include <stdint.h>

#include "rows.h"

#ifdef __cplusplus
extern "C" {
#endif

// Decompresses LZF (liblzf's stream) to at most `room` bytes. Returns how many, -1 if `from` is
// damaged or needs more room.
HSGD_IO_API int64_t hsgd_io_lzf(const void* from, int64_t size, void* to, int64_t room);

// Returns the Fletcher-32 checksum of `size` bytes, as HDF5 computes it.
HSGD_IO_API uint32_t hsgd_io_fletcher32(const void* from, int64_t size);

// Undoes the shuffle filter: plane k of `from` has byte k of every item of `item` bytes. Bytes
// after the last whole item are copied.
HSGD_IO_API void hsgd_io_unshuffle(const void* from, int64_t size, int64_t item, void* to);

#ifdef __cplusplus
}
#endif

#endif  // HSGD_IO_FILTERS_H_
