// The driver's copies.
//
// Owns the difference between registered host memory, which the device reads and writes when the
// copy comes to its turn, and pageable memory, which is read, or waited for, in the call.
#include <algorithm>
#include <cstring>
#include <vector>

#include "entry.hpp"
#include "faults.hpp"
#include "memory.hpp"

using namespace simcuda;

namespace {

constexpr size_t kLongBytes = 4096;  // copies from here on are done in two halves

enum class Kind { kDevice, kRegistered, kPageable, kInvalid };

// One side of a copy. Pageable memory is used as it is, all else is looked up in its turn.
struct Side {
  Kind kind;
  uintptr_t address;
};

CUresult look_up(const char* function, const Side& side, size_t bytes, View* view) {
  if (side.kind != Kind::kPageable)
    return memory().view(function, nullptr, side.address, bytes, view);
  view->data = reinterpret_cast<std::byte*>(side.address);
  return CUDA_SUCCESS;
}

CUresult copy(const char* function, const Side& to, const Side& from, size_t bytes) {
  View target;
  View source;
  CUresult result = look_up(function, from, bytes, &source);
  if (result == CUDA_SUCCESS) result = look_up(function, to, bytes, &target);
  if (result != CUDA_SUCCESS) return result;
  const size_t half = bytes < kLongBytes ? 0 : bytes / 2;
  if (half > 0) {
    std::memcpy(target.data, source.data, half);
    pause();
  }
  std::memcpy(target.data + half, source.data + half, bytes - half);
  return CUDA_SUCCESS;
}

// An argument of type CUdeviceptr: device memory, or host memory that the device sees.
Side device_side(CUdeviceptr pointer) {
  HostRange range;
  const auto address = static_cast<uintptr_t>(pointer);
  if (memory().is_device(address)) return {Kind::kDevice, address};
  const bool registered = memory().registered_at(address, &range);
  return {registered ? Kind::kRegistered : Kind::kInvalid, address};
}

Side host_side(const void* pointer, size_t bytes) {
  HostRange range;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (pointer == nullptr || memory().is_device(address)) return {Kind::kInvalid, address};
  const bool first = memory().registered_at(address, &range);
  const bool last = memory().registered_at(address + bytes - 1, &range) && range.first <= address;
  if (first != last) return {Kind::kInvalid, address};  // begins or ends inside of a registration
  return {first ? Kind::kRegistered : Kind::kPageable, address};
}

struct Copy {
  const char* function;
  Side to;
  Side from;
  size_t bytes;
  uint64_t simcuda_counters::* counter;
};

CUresult check(const Copy& given) {
  if (given.to.kind == Kind::kInvalid || given.from.kind == Kind::kInvalid) {
    record_violation(std::string(given.function) + ": a pointer is of neither kind of memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  count(given.counter, static_cast<int64_t>(given.bytes));
  return CUDA_SUCCESS;
}

std::shared_ptr<Mark> push(Stream& stream, const Copy& given) {
  return stream.push(
      [given](Context&) { return copy(given.function, given.to, given.from, given.bytes); });
}

// Pageable sources are read in the call; for pageable targets the call waits.
CUresult start(const Entry& entry, const Copy& given) {
  const CUresult result = check(given);
  if (result != CUDA_SUCCESS) return result;
  const bool staged = given.from.kind == Kind::kPageable;
  const bool awaited = given.to.kind == Kind::kPageable;
  if (staged || awaited) count(&simcuda_counters::pageable_copies);
  if (staged) {
    const auto* data = reinterpret_cast<const std::byte*>(given.from.address);
    auto stage = std::make_shared<std::vector<std::byte>>(data, data + given.bytes);
    entry.stream->push([given, stage](Context&) {
      const Side from{Kind::kPageable, reinterpret_cast<uintptr_t>(stage->data())};
      return copy(given.function, given.to, from, given.bytes);
    });
  } else {
    const auto mark = push(*entry.stream, given);
    if (awaited) mark->wait();
  }
  return entry.context->error();
}

CUresult start_and_wait(const Entry& entry, const Copy& given) {
  const CUresult result = check(given);
  if (result != CUDA_SUCCESS) return result;
  count(&simcuda_counters::host_synchronizations);
  push(*entry.stream, given)->wait();
  return entry.context->error();
}

}  // namespace

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused() || bytes == 0) return entry.result;
  return start(entry, {__func__, host_side(to, bytes), device_side(from), bytes,
                       &simcuda_counters::d2h_bytes});
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused() || bytes == 0) return entry.result;
  return start(entry, {__func__, device_side(to), host_side(from, bytes), bytes,
                       &simcuda_counters::h2d_bytes});
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused() || bytes == 0) return entry.result;
  return start(entry,
               {__func__, device_side(to), device_side(from), bytes, &simcuda_counters::d2d_bytes});
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  const Entry entry = enter_stream(__func__, nullptr);
  if (entry.refused() || bytes == 0) return entry.result;
  return start_and_wait(entry, {__func__, host_side(to, bytes), device_side(from), bytes,
                                &simcuda_counters::d2h_bytes});
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  const Entry entry = enter_stream(__func__, nullptr);
  if (entry.refused() || bytes == 0) return entry.result;
  return start_and_wait(entry, {__func__, device_side(to), host_side(from, bytes), bytes,
                                &simcuda_counters::h2d_bytes});
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused() || bytes == 0) return entry.result;
  const Side side = device_side(to);
  if (side.kind == Kind::kInvalid) return CUDA_ERROR_INVALID_VALUE;
  entry.stream->push([side, value, bytes](Context&) {
    View target;
    const CUresult result = look_up("cuMemsetD8Async", side, bytes, &target);
    if (result == CUDA_SUCCESS) std::memset(target.data, value, bytes);
    return result;
  });
  return CUDA_SUCCESS;
}
