// preadv with a destination per row. Owns the choice between reading straight into the rows and
// going through a staging buffer that stays in the cache, and how threads share tasks. Never
// allocates and never throws.
#include "rows.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr int kVectors = 1024;           // IOV_MAX of Linux
constexpr int64_t kCallBytes = 8 << 20;  // one preadv
// Below this many bytes in one place, on average, the kernel's work per vector costs more than a
// second copy out of the cache (measured on EPYC 9004: break-even between 1 and 2 KB).
constexpr int64_t kVectorBytes = 2048;

// One range.
struct Request {
  int file;
  int64_t offset;
  int64_t row_bytes;
  int64_t rows;
  const uint64_t* places;
  hsgd_io_task* outcome;
};

char* address(uint64_t place) { return reinterpret_cast<char*>(static_cast<uintptr_t>(place)); }

// Length of the run of rows from `row` on that are adjacent in memory, or all unwanted.
int64_t run_of(const Request& request, int64_t row) {
  const uint64_t* places = request.places;
  const uint64_t step = places[row] == 0 ? 0 : static_cast<uint64_t>(request.row_bytes);
  int64_t end = row + 1;
  while (end < request.rows && places[end] == places[end - 1] + step) ++end;
  return end - row;
}

// preadv until everything arrived; advances `vectors`.
int read_all(const Request& request, iovec* vectors, int count, int64_t offset) {
  while (count > 0) {
    const ssize_t got = preadv(request.file, vectors, count, offset);
    request.outcome->position = offset;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return HSGD_IO_END;
    ++request.outcome->calls;
    offset += got;
    size_t left = static_cast<size_t>(got);
    while (count > 0 && left >= vectors->iov_len) {
      left -= vectors->iov_len;
      ++vectors;
      --count;
    }
    if (count > 0) {
      vectors->iov_base = static_cast<char*>(vectors->iov_base) + left;
      vectors->iov_len -= left;
    }
  }
  return 0;
}

int read_into_rows(const Request& request) {
  iovec vectors[kVectors];
  int64_t row = 0;
  while (row < request.rows) {
    int64_t offset = request.offset + row * request.row_bytes;
    int count = 0;
    int64_t bytes = 0;
    while (row < request.rows && count < kVectors && bytes < kCallBytes) {
      const int64_t run = run_of(request, row);
      const int64_t length = run * request.row_bytes;
      if (request.places[row] == 0) {
        if (count > 0) break;
        offset += length;
      } else {
        vectors[count++] = {address(request.places[row]), static_cast<size_t>(length)};
        bytes += length;
      }
      row += run;
    }
    const int status = read_all(request, vectors, count, offset);
    if (status != 0) return status;
  }
  return 0;
}

// Copies bytes [begin, begin + count) of the rows, which lie at `from`, to their places.
void place_bytes(const Request& request, const char* from, int64_t begin, int64_t count) {
  int64_t row = begin / request.row_bytes;
  int64_t skip = begin % request.row_bytes;
  while (count > 0) {
    const int64_t length = std::min(count, request.row_bytes - skip);
    if (request.places[row] != 0) {
      std::memcpy(address(request.places[row]) + skip, from, static_cast<size_t>(length));
    }
    from += length;
    count -= length;
    skip = 0;
    ++row;
  }
}

struct Staging {
  char* memory;
  int64_t bytes;
};

int read_through_staging(const Request& request, const Staging& staging, int64_t alignment) {
  const int64_t mask = ~(alignment - 1);
  const int64_t end = request.offset + request.rows * request.row_bytes;
  int64_t from = request.offset;
  while (from < end) {
    const int64_t start = from & mask;
    const int64_t need = ((end + alignment - 1) & mask) - start;
    const auto length = static_cast<size_t>(std::min(staging.bytes, need));
    const ssize_t got = pread(request.file, staging.memory, length, start);
    request.outcome->position = from;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    const int64_t fresh = std::min<int64_t>(start + got, end) - from;
    if (fresh <= 0) return HSGD_IO_END;
    ++request.outcome->calls;
    place_bytes(request, staging.memory + (from - start), from - request.offset, fresh);
    from += fresh;
  }
  return 0;
}

// The whole range into the staging buffer, and on only if it is right.
int read_checked(const Request& request, const Staging& staging, int64_t alignment,
                 uint32_t checksum) {
  const int64_t mask = ~(alignment - 1);
  const int64_t bytes = request.rows * request.row_bytes;
  const int64_t start = request.offset & mask;
  const int64_t end = request.offset + bytes;
  const int64_t limit = (end + alignment - 1) & mask;
  if (limit - start > staging.bytes) return ENOBUFS;
  for (int64_t from = start; from < end;) {
    request.outcome->position = from;
    const ssize_t got = pread(request.file, staging.memory + (from - start),
                              static_cast<size_t>(limit - from), from);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return HSGD_IO_END;
    ++request.outcome->calls;
    from += got;
    if (from < end) from &= mask;
  }
  request.outcome->position = request.offset;
  const char* first = staging.memory + (request.offset - start);
  if (hsgd_io_crc32c(0, first, bytes) != checksum) return HSGD_IO_MISMATCH;
  hsgd_io_move_rows(first, request.row_bytes, request.rows, request.places);
  return 0;
}

int read_range(const Request& request, const Staging& staging, int64_t alignment) {
  if (alignment <= 1) {
    int64_t runs = 0;
    for (int64_t row = 0; row < request.rows; row += run_of(request, row)) ++runs;
    if (request.row_bytes * request.rows >= runs * kVectorBytes) return read_into_rows(request);
  }
  return read_through_staging(request, staging, alignment);
}

int do_task(hsgd_io_task* task, const Staging& staging) {
  const uint64_t* places = task->places;
  for (int64_t i = 0; i < task->ranges; ++i) {
    const int64_t offset = task->offset + task->starts[i] * task->row_bytes;
    const Request request{task->file, offset, task->row_bytes, task->counts[i], places, task};
    const int status = task->checksums == nullptr
                           ? read_range(request, staging, task->alignment)
                           : read_checked(request, staging, task->alignment, task->checksums[i]);
    if (status != 0) return status;
    places += task->counts[i];
  }
  return 0;
}

}  // namespace

extern "C" int hsgd_io_work(hsgd_io_batch* batch, void* staging, int64_t staging_bytes) {
  const Staging own{static_cast<char*>(staging), staging_bytes};
  int was_last = 0;
  for (;;) {
    // Relaxed: tasks were written before the batch was shown to any thread, by Python's own locks.
    const int64_t taken = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
    if (taken >= batch->count) return was_last;
    batch->tasks[taken].status = do_task(&batch->tasks[taken], own);
    // Acquire and release: the thread that sees the last task done sees the rows and the status of
    // all others, which it would otherwise hand out before they were written.
    if (__atomic_add_fetch(&batch->finished, 1, __ATOMIC_ACQ_REL) == batch->count) was_last = 1;
  }
}

extern "C" void hsgd_io_move_rows(const void* from, int64_t row_bytes, int64_t rows,
                                  const uint64_t* places) {
  const Request request{-1, 0, row_bytes, rows, places, nullptr};
  const char* bytes = static_cast<const char*>(from);
  for (int64_t row = 0; row < rows;) {  // adjacent rows in one copy
    const int64_t run = run_of(request, row);
    const int64_t length = run * row_bytes;
    if (places[row] != 0) {
      std::memcpy(address(places[row]), bytes, static_cast<size_t>(length));
    }
    bytes += length;
    row += run;
  }
}
