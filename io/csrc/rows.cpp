// hsgd_io_work(): reads rows with preadv, with a destination per row.
//
// Reads straight into the rows, or through a staging buffer that stays in the cache; threads share
// tasks. Never allocates and never throws.
#include "rows.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr int kVectors = 1024;           // IOV_MAX of Linux
constexpr int64_t kCallBytes = 8 << 20;  // bytes of one preadv
// Below this many bytes in one place, on average, the kernel's work per vector costs more than a
// second copy out of the cache (measured on EPYC 9004: break-even between 1 and 2 KB).
constexpr int64_t kVectorBytes = 2048;
constexpr int64_t kSampledRows = 1024;  // rows sampled to find the length of runs

// One range. Its first byte is at `offset` of the file.
struct Request {
  int file;
  int64_t offset;
  int64_t row_bytes;
  const int64_t* sizes;  // or NULL
  int64_t rows;
  const uint64_t* places;
  const uint64_t* bases;  // or NULL: then places are addresses
  uint64_t base_offset;
  hsgd_io_task* outcome;

  int64_t size(int64_t row) const { return sizes == nullptr ? row_bytes : sizes[row]; }

  // Returns the destination of a wanted row.
  char* address(int64_t row) const {
    uint64_t place = places[row];
    if (bases != nullptr) {
      const auto inside = static_cast<uint32_t>(place) * static_cast<uint64_t>(row_bytes);
      place = bases[(place >> 32) - 1] + base_offset + inside;
    }
    return reinterpret_cast<char*>(static_cast<uintptr_t>(place));
  }

  int64_t bytes() const {
    if (sizes == nullptr) return rows * row_bytes;
    int64_t sum = 0;
    for (int64_t row = 0; row < rows; ++row) sum += sizes[row];
    return sum;
  }
};

// Rows that are adjacent in memory, or all skipped.
struct Run {
  int64_t rows;
  int64_t bytes;
};

// Returns how many places from `first` on are `step` apart, at most `count`; at least 1.
int64_t steady(const uint64_t* first, int64_t count, uint64_t step) {
  constexpr int64_t kStep = 16;  // a loop without exits, for vector instructions
  int64_t end = 1;
  if (end >= count || first[end] - first[end - 1] != step) return end;
  for (; end + kStep <= count; end += kStep) {
    uint64_t differs = 0;
    for (int64_t k = end; k < end + kStep; ++k) differs |= (first[k] - first[k - 1]) ^ step;
    if (differs != 0) break;
  }
  while (end < count && first[end] - first[end - 1] == step) ++end;
  return end;
}

// Returns the run that begins with `row`, up to row `stop`.
Run run_of(const Request& request, int64_t row, int64_t stop) {
  const uint64_t* places = request.places;
  const bool wanted = places[row] != 0;
  if (request.sizes == nullptr) {
    const uint64_t step = request.bases == nullptr ? static_cast<uint64_t>(request.row_bytes) : 1;
    const int64_t rows = steady(places + row, stop - row, wanted ? step : 0);
    return {rows, rows * request.row_bytes};
  }
  int64_t end = row + 1;
  int64_t bytes = request.sizes[row];
  while (end < stop) {
    const auto step = static_cast<uint64_t>(wanted ? bytes : 0);
    if (places[end] != places[row] + step) break;
    bytes += request.sizes[end];
    ++end;
  }
  return {end - row, bytes};
}

// Calls preadv until all data has arrived; advances `vectors`.
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
  int64_t position = request.offset;
  while (row < request.rows) {
    int64_t offset = position;
    int count = 0;
    int64_t bytes = 0;
    while (row < request.rows && count < kVectors && bytes < kCallBytes) {
      const Run run = run_of(request, row, request.rows);
      if (request.places[row] == 0) {
        if (count > 0) break;
        offset += run.bytes;
      } else if (run.bytes > 0) {
        vectors[count++] = {request.address(row), static_cast<size_t>(run.bytes)};
        bytes += run.bytes;
      }
      row += run.rows;
      position += run.bytes;
    }
    const int status = read_all(request, vectors, count, offset);
    if (status != 0) return status;
  }
  return 0;
}

// Copies rows [row, stop), which are at `from`, adjacent ones in one copy. Returns the end of the
// rows.
const char* move_runs(const Request& request, int64_t row, int64_t stop, const char* from) {
  while (row < stop) {
    const Run run = run_of(request, row, stop);
    if (request.places[row] != 0) {
      std::memcpy(request.address(row), from, static_cast<size_t>(run.bytes));
    }
    from += run.bytes;
    row += run.rows;
  }
  return from;
}

// Does the same for rows of N bytes in places of batches: a copy of known length takes one or two
// instructions, while a call costs several times as much as the copy.
template <int64_t N>
const char* move_values(const Request& request, int64_t row, int64_t stop, const char* from) {
  const uint64_t* places = request.places;
  while (row < stop) {
    if (row + 1 < stop && places[row + 1] == places[row] + 1) {
      const Run run = run_of(request, row, stop);
      from = move_runs(request, row, row + run.rows, from);
      row += run.rows;
      continue;
    }
    if (places[row] != 0) std::memcpy(request.address(row), from, N);
    from += N;
    ++row;
  }
  return from;
}

const char* move_rows(const Request& request, int64_t row, int64_t stop, const char* from) {
  if (request.bases != nullptr) {
    switch (request.row_bytes) {
      case 1:
        return move_values<1>(request, row, stop, from);
      case 2:
        return move_values<2>(request, row, stop, from);
      case 4:
        return move_values<4>(request, row, stop, from);
      case 8:
        return move_values<8>(request, row, stop, from);
      case 16:
        return move_values<16>(request, row, stop, from);
      default:
        break;
    }
  }
  return move_runs(request, row, stop, from);
}

// A position in the bytes of a range.
struct Cursor {
  int64_t row = 0;
  int64_t skip = 0;
};

// Copies the part of one row in the `count` bytes at `from` to its place; returns its length.
int64_t place_part(const Request& request, const char* from, int64_t count, Cursor* cursor) {
  const int64_t left = request.size(cursor->row) - cursor->skip;
  const int64_t length = std::min(count, left);
  if (request.places[cursor->row] != 0) {
    std::memcpy(request.address(cursor->row) + cursor->skip, from, static_cast<size_t>(length));
  }
  cursor->skip += length;
  if (length == left) *cursor = {cursor->row + 1, 0};
  return length;
}

// Copies the next `count` bytes of the rows, which are at `from`, to their places.
void place_bytes(const Request& request, const char* from, int64_t count, Cursor* cursor) {
  const char* end = from + count;
  while (from < end) {
    int64_t whole = 0;
    if (request.sizes == nullptr && cursor->skip == 0) whole = (end - from) / request.row_bytes;
    if (whole > 0) {
      from = move_rows(request, cursor->row, cursor->row + whole, from);
      cursor->row += whole;
    } else {
      from += place_part(request, from, end - from, cursor);
    }
  }
}

struct Staging {
  char* memory;
  int64_t bytes;
};

int read_through_staging(const Request& request, const Staging& staging, int64_t alignment) {
  const int64_t mask = ~(alignment - 1);
  const int64_t end = request.offset + request.bytes();
  int64_t from = request.offset;
  Cursor cursor;
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
    place_bytes(request, staging.memory + (from - start), fresh, &cursor);
    from += fresh;
  }
  return 0;
}

// Reads the whole range into the staging buffer, and copies it on only if its checksum is right.
int read_checked(const Request& request, const Staging& staging, int64_t alignment,
                 uint32_t checksum) {
  const int64_t mask = ~(alignment - 1);
  const int64_t bytes = request.bytes();
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
    const int64_t reached = from + got;
    // The file has become shorter: a read ended within its last block, and reading again returns
    // nothing more.
    if (reached < end && (reached & mask) <= from) return HSGD_IO_END;
    from = reached < end ? reached & mask : reached;
  }
  request.outcome->position = request.offset;
  const char* first = staging.memory + (request.offset - start);
  if (hsgd_io_crc32c(0, first, bytes) != checksum) return HSGD_IO_MISMATCH;
  move_rows(request, 0, request.rows, first);
  return 0;
}

int read_range(const Request& request, const Staging& staging, int64_t alignment) {
  if (alignment <= 1) {
    int64_t runs = 0;
    int64_t bytes = 0;
    const int64_t sampled = std::min(request.rows, kSampledRows);
    for (int64_t row = 0; row < sampled; ++runs) {
      const Run run = run_of(request, row, request.rows);
      row += run.rows;
      bytes += run.bytes;
    }
    if (bytes >= runs * kVectorBytes) return read_into_rows(request);
  }
  return read_through_staging(request, staging, alignment);
}

int do_task(hsgd_io_task* task, const Staging& staging) {
  const uint64_t* places = task->places;
  const int64_t* sizes = task->sizes;
  for (int64_t i = 0; i < task->ranges; ++i) {
    const int64_t count = task->counts[i];
    const int64_t offset = task->offset + task->starts[i] * task->row_bytes;
    const Request request{task->file, offset,      task->row_bytes,   sizes, count,
                          places,     task->bases, task->base_offset, task};
    int status = 0;
    if (task->memory != nullptr) {
      move_rows(request, 0, count, static_cast<const char*>(task->memory) + offset);
    } else if (task->checksums != nullptr) {
      status = read_checked(request, staging, task->alignment, task->checksums[i]);
    } else {
      status = read_range(request, staging, task->alignment);
    }
    if (status != 0) return status;
    places += count;
    if (sizes != nullptr) sizes += count;
  }
  return 0;
}

// Returns how often this thread has gone to sleep, rather than lost its processor.
int64_t sleeps() {
  rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
}

}  // namespace

extern "C" int hsgd_io_work(hsgd_io_batch* batch, void* staging, int64_t staging_bytes) {
  const Staging own{static_cast<char*>(staging), staging_bytes};
  int was_last = 0;
  for (;;) {
    // Relaxed: tasks were written before the batch was shown to any thread, by Python's own locks.
    const int64_t taken = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED);
    if (taken >= batch->count) return was_last;
    hsgd_io_task* task = &batch->tasks[taken];
    const int64_t before = sleeps();
    task->status = do_task(task, own);
    task->slept = sleeps() != before;
    // Acquire and release: the thread that sees the last task done must also see the rows and the
    // status of all others before it hands them out.
    if (__atomic_add_fetch(&batch->finished, 1, __ATOMIC_ACQ_REL) == batch->count) was_last = 1;
  }
}

extern "C" void hsgd_io_move_rows(const void* from, int64_t row_bytes, const int64_t* sizes,
                                  int64_t rows, const uint64_t* places) {
  const Request request{-1, 0, row_bytes, sizes, rows, places, nullptr, 0, nullptr};
  move_rows(request, 0, rows, static_cast<const char*>(from));
}
