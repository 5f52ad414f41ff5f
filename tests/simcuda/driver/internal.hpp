// What other simulated libraries use of the simulated driver: work on streams, and its memory.
//
// Owns the C++ interface that libsimcuda.so exports to libsimnccl.so. Handles stay opaque here.
#ifndef SIMCUDA_DRIVER_INTERNAL_HPP_
#define SIMCUDA_DRIVER_INTERNAL_HPP_

#include <sched.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "../cuda_types.hpp"

namespace simcuda {

// The primary context of a device. Lives as long as the process.
class SIMCUDA_API Context {
 public:
  Context(int device, std::string uuid) : device_(device), uuid_(std::move(uuid)) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }
  const std::string& uuid() const { return uuid_; }  // 16 bytes
  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
  // The error that all calls give from the first bad access on. Work that is queued then does
  // nothing, and work that waits must look here and return.
  CUresult error() const { return static_cast<CUresult>(error_.load(std::memory_order_acquire)); }
  bool failed() const { return error() != CUDA_SUCCESS; }
  void fail(CUresult error);
  void recover() { error_.store(CUDA_SUCCESS, std::memory_order_release); }

  bool retained() const { return retained_.load() > 0; }
  void retain() { ++retained_; }
  bool release();  // false: was not retained

 private:
  const int device_;
  const std::string uuid_;
  // Written by threads of streams, read by all: release and acquire, so that whoever sees an error
  // also sees the violation that was recorded before it.
  std::atomic<int> error_{CUDA_SUCCESS};
  std::atomic<int> retained_{0};
};

// Memory as a piece of work may use it while it holds this.
struct View {
  std::byte* data = nullptr;
  std::shared_ptr<const void> hold;
};

// Runs on the stream's thread; an answer other than CUDA_SUCCESS sticks to the context. Destroyed
// without a run where the context has failed.
using Work = std::function<CUresult(Context&)>;

// The context that is current in this thread; nullptr: none.
SIMCUDA_API Context* current_context();

// That, or of the first device, which is initialized, as the CUDA runtime does; nullptr: no device.
SIMCUDA_API Context* current_or_first_context();

// Makes a context current in this thread for a while, without a call that tests could see.
class SIMCUDA_API ScopedContext {
 public:
  explicit ScopedContext(Context& context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
};

// Puts work on a stream. `function`: the name of the API function, for texts and for errors that a
// test asks for.
SIMCUDA_API CUresult enqueue(const char* function, CUstream stream, Work work);

// Memory of a kernel, device or registered host memory, inside of work. CUDA_ERROR_ILLEGAL_ADDRESS,
// and a violation: it is neither, was freed, or ends before `bytes`.
SIMCUDA_API CUresult translate(const char* function, Context& context, const void* address,
                               size_t bytes, View* view);

// The error that a test wants of this call; 0: none. Counts the call.
SIMCUDA_API int injected(const char* function);

SIMCUDA_API void record_violation(const std::string& text);

// Inside of work: the random delay before, or in the middle of, an operation.
SIMCUDA_API void pause();

// Waiting for a value that another thread or process writes: yields first, then sleeps.
class Patience {
 public:
  void wait() {
    if (++rounds_ < kYields) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(kSleep_us));
    }
  }

 private:
  static constexpr int kYields = 20;
  static constexpr int kSleep_us = 40;
  int rounds_ = 0;
};

}  // namespace simcuda

#endif  // SIMCUDA_DRIVER_INTERNAL_HPP_
