// Device: calls the functions of the CUDA driver, found at run time; no other code of hsgd calls
// CUDA.
//
// Owns one device of this process: the driver's library, and the primary context, which PyTorch,
// CuPy and JAX use, too. Turns the driver's errors into exceptions. Needs no header and no library
// of CUDA to build. Waits for the device only in synchronize() and drains().
#ifndef HSGD_DEVICE_DEVICE_HPP_
#define HSGD_DEVICE_DEVICE_HPP_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os/wait.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Types of the driver's ABI: handles are pointers that only the driver dereferences.
using CudaStream = void*;  // nullptr: the default stream
using CudaEvent = void*;
using CudaContext = void*;
using DeviceAddress = unsigned long long;
using CudaResult = int;

struct CudaUuid {
  unsigned char bytes[16];
};

// The driver's functions as CUDA 12 and later declare them.
struct CudaDriver {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuDeviceGet)(int* device, int ordinal);
  CudaResult (*cuDeviceGetUuid)(CudaUuid* uuid, int device);
  CudaResult (*cuPointerGetAttribute)(void* value, int attribute, DeviceAddress address);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, int device);
  CudaResult (*cuDevicePrimaryCtxRelease)(int device);
  CudaResult (*cuCtxPushCurrent)(CudaContext context);
  CudaResult (*cuCtxPopCurrent)(CudaContext* context);
  CudaResult (*cuMemAlloc)(DeviceAddress* address, size_t bytes);
  CudaResult (*cuMemFree)(DeviceAddress address);
  CudaResult (*cuMemHostRegister)(void* memory, size_t bytes, unsigned flags);
  CudaResult (*cuMemHostUnregister)(void* memory);
  CudaResult (*cuMemHostGetDevicePointer)(DeviceAddress* address, void* memory, unsigned flags);
  CudaResult (*cuMemcpyDtoHAsync)(void* to, DeviceAddress from, size_t bytes, CudaStream stream);
  CudaResult (*cuMemcpyHtoDAsync)(DeviceAddress to, const void* from, size_t bytes,
                                  CudaStream stream);
  CudaResult (*cuMemcpyDtoDAsync)(DeviceAddress to, DeviceAddress from, size_t bytes,
                                  CudaStream stream);
  CudaResult (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned flags, int priority);
  CudaResult (*cuStreamDestroy)(CudaStream stream);
  CudaResult (*cuStreamSynchronize)(CudaStream stream);
  CudaResult (*cuStreamIsCapturing)(CudaStream stream, int* status);
  CudaResult (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*cuStreamWriteValue32)(CudaStream stream, DeviceAddress address, uint32_t value,
                                     unsigned flags);
  CudaResult (*cuStreamWaitValue32)(CudaStream stream, DeviceAddress address, uint32_t value,
                                    unsigned flags);
  CudaResult (*cuEventCreate)(CudaEvent* event, unsigned flags);
  CudaResult (*cuEventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*cuEventQuery)(CudaEvent event);
  CudaResult (*cuEventDestroy)(CudaEvent event);
  CudaResult (*cuGetErrorName)(CudaResult code, const char** name);
};

class HSGD_API Device {
 public:
  // Returns the number of the device that holds an address. Throws HSGD_ERR_ARGUMENT if none does.
  static int ordinal_of(const std::string& library, DeviceAddress address);

  // Opens a device on this rank alone. `library`: the driver's name or path. Throws HSGD_ERR_SYSTEM
  // if there is no driver or no such device.
  Device(const std::string& library, int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int ordinal() const { return ordinal_; }
  const CudaUuid& uuid() const { return uuid_; }

  // Makes the device's context current in this thread while it exists; all other calls here need
  // that.
  class HSGD_API Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
  };

  // All of these are asynchronous, in the order of their stream; each throws HSGD_ERR_SYSTEM with
  // the driver's name of the error.
  void copy_down(void* to, DeviceAddress from, size_t bytes, CudaStream stream) const;
  void copy_up(DeviceAddress to, const void* from, size_t bytes, CudaStream stream) const;
  void copy_within(DeviceAddress to, DeviceAddress from, size_t bytes, CudaStream stream) const;
  void wait(CudaStream stream, CudaEvent event) const;
  void record(CudaEvent event, CudaStream stream) const;
  // Write a word in registered host memory, given by its device address, or wait until it is at
  // least `value`, compared modulo 2^32.
  void write(CudaStream stream, DeviceAddress word, uint32_t value) const;
  void wait_for(CudaStream stream, DeviceAddress word, uint32_t value) const;
  bool is_capturing(CudaStream stream) const;  // into a graph
  bool is_done(CudaEvent event) const;
  // Returns true if nothing can run on the device any more, as after an illegal access.
  bool is_lost(CudaEvent any) const noexcept;
  // Blocks until the stream is empty. Not used in collectives.
  void synchronize(CudaStream stream) const;
  // Waits the same way, at most until the deadline. Returns true if the stream is empty or will
  // never run again.
  bool drains(CudaStream stream, CudaEvent event, const Deadline& deadline) const noexcept;

  CudaStream new_stream() const;  // a stream that waits for no other, not even the default one
  CudaEvent new_event() const;    // an event without a time
  DeviceAddress allocate(size_t bytes) const;
  void register_memory(void* memory, size_t bytes) const;
  DeviceAddress device_address(void* registered) const;
  // Release resources and ignore errors: the context may be gone.
  void destroy_stream(CudaStream stream) const noexcept;
  void destroy_event(CudaEvent event) const noexcept;
  void free(DeviceAddress address) const noexcept;
  void unregister_memory(void* memory) const noexcept;

 private:
  void check(CudaResult code, const char* what) const;

  CudaDriver driver_{};
  int ordinal_;
  int device_ = -1;
  CudaContext context_ = nullptr;
  CudaUuid uuid_{};
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_DEVICE_HPP_
