// The driver's functions for streams and events.
#include "entry.hpp"
#include "faults.hpp"
#include "memory.hpp"

using namespace simcuda;

namespace {

constexpr unsigned kStreamFlags = 1;  // non-blocking, as all streams here are
constexpr unsigned kEventFlags = 7;   // blocking wait, no timing, for other processes
constexpr unsigned kWaitFlags = 1;    // external, for graphs

// Where cuStreamWriteValue32 and cuStreamWaitValue32 may write and read.
CUresult check_word(CUdeviceptr address) {
  HostRange range;
  const bool known = memory().is_device(address) || memory().registered_at(address, &range);
  return known && address % sizeof(cuuint32_t) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool satisfied(cuuint32_t found, cuuint32_t value, unsigned flags) {
  switch (flags & ~CU_STREAM_WAIT_VALUE_FLUSH) {
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & value) != 0;
    case CU_STREAM_WAIT_VALUE_NOR:
      return ~(found | value) != 0;
    default:
      return static_cast<int32_t>(found - value) >= 0;  // cyclic
  }
}

// Looks the memory up each time: the host may take it back while the stream waits.
CUresult wait_for_word(Context& context, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  for (Patience patience; !context.failed(); patience.wait()) {
    View view;
    const CUresult result =
        memory().view("cuStreamWaitValue32_v2", nullptr, address, sizeof value, &view);
    if (result != CUDA_SUCCESS) return result;
    // Pairs with the writer's release: what was written before the value is then seen.
    const cuuint32_t found =
        __atomic_load_n(reinterpret_cast<cuuint32_t*>(view.data), __ATOMIC_ACQUIRE);
    if (satisfied(found, value, flags)) return CUDA_SUCCESS;
  }
  return CUDA_SUCCESS;
}

CUresult wait_for(const std::shared_ptr<Mark>& mark, const Context& context) {
  count(&simcuda_counters::host_synchronizations);
  if (mark != nullptr) mark->wait();
  return context.error();
}

CUresult reached(const std::shared_ptr<Mark>& mark, const Context& context) {
  if (mark != nullptr && !mark->reached()) return CUDA_ERROR_NOT_READY;
  return context.error();
}

struct EventEntry : Entry {
  explicit EventEntry(Entry entry) : Entry(std::move(entry)) {}
  std::shared_ptr<Event> event;
};

// An entry that names an event too.
EventEntry with_event(Entry entry, CUevent handle) {
  EventEntry found(std::move(entry));
  if (found.refused()) return found;
  found.event = streams().find_event(handle);
  if (found.event == nullptr) {
    record_violation("no such event");
    found.result = CUDA_ERROR_INVALID_HANDLE;
  }
  return found;
}

std::shared_ptr<Mark> latest(Event& event) {
  const std::lock_guard<std::mutex> lock(event.mutex);
  return event.mark;
}

}  // namespace

CUresult cuCtxSynchronize() {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  count(&simcuda_counters::host_synchronizations);
  streams().synchronize(*entry.context);
  return entry.context->error();
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  if (stream == nullptr || (flags & ~kStreamFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  *stream = streams().create(*entry.context)->handle();
  return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  if (stream == nullptr || (flags & ~kStreamFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  *stream = streams().create(*entry.context)->handle();
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  const Entry entry = enter(__func__);
  if (entry.refuses_release()) return entry.result;
  const auto stream = streams().remove(handle);
  if (stream == nullptr) {
    record_violation("cuStreamDestroy_v2: no such stream");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  stream->end();
  return entry.result;
}

CUresult cuStreamSynchronize(CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  return entry.refused() ? entry.result : wait_for(entry.stream->last(), *entry.context);
}

CUresult cuStreamQuery(CUstream stream) {
  const Entry entry = enter_stream(__func__, stream);
  return entry.refused() ? entry.result : reached(entry.stream->last(), *entry.context);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned flags) {
  const EventEntry entry = with_event(enter_stream(__func__, stream), handle);
  if (entry.refused()) return entry.result;
  if ((flags & ~kWaitFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Mark> mark = latest(*entry.event);
  if (faults().leaves_out(__func__) || mark == nullptr) return CUDA_SUCCESS;
  entry.stream->push([mark](Context&) {
    mark->wait();
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  const auto stream = streams().find(handle, *entry.context);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = static_cast<CUstreamCaptureStatus>(stream->capturing.load());
  return CUDA_SUCCESS;
}

CUresult simcuda_set_capturing(CUstream handle, int status) {
  Context* current = current_context();
  const auto stream = current == nullptr ? nullptr : streams().find(handle, *current);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->capturing.store(status);
  return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                 unsigned flags) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused()) return entry.result;
  if (flags > 1 || check_word(address) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  const auto write = [address, value](Context&) {
    View view;
    const CUresult result =
        memory().view("cuStreamWriteValue32_v2", nullptr, address, sizeof value, &view);
    // Release: whoever sees the value sees what the stream wrote before.
    if (result == CUDA_SUCCESS)
      __atomic_store_n(reinterpret_cast<cuuint32_t*>(view.data), value, __ATOMIC_RELEASE);
    return result;
  };
  if (faults().leaves_out(__func__)) return write(*entry.context);
  entry.stream->push(write);
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                unsigned flags) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused()) return entry.result;
  if ((flags & ~CU_STREAM_WAIT_VALUE_FLUSH) > CU_STREAM_WAIT_VALUE_NOR)
    return CUDA_ERROR_INVALID_VALUE;
  if (check_word(address) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  if (faults().leaves_out(__func__)) return CUDA_SUCCESS;
  entry.stream->push([address, value, flags](Context& context) {
    return wait_for_word(context, address, value, flags);
  });
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
  const Entry entry = enter_stream(__func__, stream);
  if (entry.refused()) return entry.result;
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  entry.stream->push([function, user_data](Context&) {
    in_host_function() = true;
    function(user_data);
    in_host_function() = false;
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  const Entry entry = enter(__func__);
  if (entry.refused()) return entry.result;
  if (event == nullptr || (flags & ~kEventFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  *event = streams().add_event(*entry.context);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
  const EventEntry entry = with_event(enter_stream(__func__, stream), handle);
  if (entry.refused()) return entry.result;
  if (&entry.event->context != entry.context) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard<std::mutex> lock(entry.event->mutex);
  entry.event->mark = entry.stream->last();
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  const EventEntry entry = with_event(enter(__func__), handle);
  if (entry.refused()) return entry.result;
  return reached(latest(*entry.event), entry.event->context);
}

CUresult cuEventSynchronize(CUevent handle) {
  const EventEntry entry = with_event(enter(__func__), handle);
  if (entry.refused()) return entry.result;
  return wait_for(latest(*entry.event), entry.event->context);
}

CUresult cuEventDestroy_v2(CUevent handle) {
  const Entry entry = enter(__func__);
  if (entry.refuses_release()) return entry.result;
  if (!streams().remove_event(handle)) {
    record_violation("cuEventDestroy_v2: no such event");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return entry.result;
}
