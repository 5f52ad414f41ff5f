// Device: finds the driver's functions by name and describes its errors.
#include "device/device.hpp"

#include <dlfcn.h>

#include "core/base/error.hpp"

namespace hsgd {
namespace {

// Values of CUDA's header.
constexpr CudaResult kSuccess = 0;
constexpr CudaResult kNotReady = 600;
constexpr CudaResult kDeinitialized = 4;
constexpr CudaResult kInvalidContext = 201;
constexpr CudaResult kFirstLasting = 700;  // illegal address
constexpr CudaResult kLastLasting = 799;
constexpr CudaResult kUnknown = 999;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr unsigned kWaitValueAtLeast = 0;
constexpr int kDeviceOrdinal = 9;           // the attribute of a pointer: its device
constexpr unsigned kWriteValueDefault = 0;  // earlier writes are visible before the word

class Library {
 public:
  explicit Library(const std::string& name)
      : name_(name), handle_(::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      throw_error(HSGD_ERR_SYSTEM, -1,
                  "no CUDA driver: %s; arrays on a device need NVIDIA's driver, version 535 "
                  "or newer (HSGD_CUDA_LIBRARY names its library)",
                  ::dlerror());
    }
  }
  // Never closed: the driver's threads run its code until the process ends.

  template <class Function>
  void find(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(::dlsym(handle_, symbol));
    if (function != nullptr) return;
    throw_error(HSGD_ERR_SYSTEM, -1,
                "%s has no %s: this CUDA driver is too old; install version 535 or newer",
                name_.c_str(), symbol);
  }

 private:
  std::string name_;
  void* handle_;
};

CudaDriver load(const std::string& name) {
  const Library library(name);
  CudaDriver driver{};
  library.find(driver.cuInit, "cuInit");
  library.find(driver.cuDeviceGet, "cuDeviceGet");
  library.find(driver.cuDeviceGetUuid, "cuDeviceGetUuid_v2");
  library.find(driver.cuPointerGetAttribute, "cuPointerGetAttribute");
  library.find(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  library.find(driver.cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
  library.find(driver.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  library.find(driver.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  library.find(driver.cuMemAlloc, "cuMemAlloc_v2");
  library.find(driver.cuMemFree, "cuMemFree_v2");
  library.find(driver.cuMemHostRegister, "cuMemHostRegister_v2");
  library.find(driver.cuMemHostUnregister, "cuMemHostUnregister");
  library.find(driver.cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2");
  library.find(driver.cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
  library.find(driver.cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
  library.find(driver.cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
  library.find(driver.cuStreamCreateWithPriority, "cuStreamCreateWithPriority");
  library.find(driver.cuStreamDestroy, "cuStreamDestroy_v2");
  library.find(driver.cuStreamSynchronize, "cuStreamSynchronize");
  library.find(driver.cuStreamIsCapturing, "cuStreamIsCapturing");
  library.find(driver.cuStreamWaitEvent, "cuStreamWaitEvent");
  library.find(driver.cuStreamWriteValue32, "cuStreamWriteValue32_v2");
  library.find(driver.cuStreamWaitValue32, "cuStreamWaitValue32_v2");
  library.find(driver.cuEventCreate, "cuEventCreate");
  library.find(driver.cuEventRecord, "cuEventRecord");
  library.find(driver.cuEventQuery, "cuEventQuery");
  library.find(driver.cuEventDestroy, "cuEventDestroy_v2");
  library.find(driver.cuGetErrorName, "cuGetErrorName");
  return driver;
}

}  // namespace

int Device::ordinal_of(const std::string& library, DeviceAddress address) {
  const CudaDriver driver = load(library);
  int ordinal = -1;
  if (driver.cuInit(0) == kSuccess &&
      driver.cuPointerGetAttribute(&ordinal, kDeviceOrdinal, address) == kSuccess)
    return ordinal;
  throw_invalid("the array is not on a CUDA device that the driver knows");
}

Device::Device(const std::string& library, int ordinal)
    : driver_(load(library)), ordinal_(ordinal) {
  check(driver_.cuInit(0), "cuInit");
  check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  check(driver_.cuDeviceGetUuid(&uuid_, device_), "cuDeviceGetUuid");
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() {
  if (context_ != nullptr) static_cast<void>(driver_.cuDevicePrimaryCtxRelease(device_));
}

void Device::check(CudaResult code, const char* what) const {
  if (code == kSuccess) return;
  const char* name = nullptr;
  if (driver_.cuGetErrorName(code, &name) != kSuccess || name == nullptr) name = "unknown";
  throw_error(HSGD_ERR_SYSTEM, -1, "CUDA device %d: %s failed: error %d (%s)", ordinal_, what, code,
              name);
}

Device::Current::Current(const Device& device) : device_(device) {
  device.check(device.driver_.cuCtxPushCurrent(device.context_), "cuCtxPushCurrent");
}

Device::Current::~Current() {
  CudaContext ours = nullptr;
  static_cast<void>(device_.driver_.cuCtxPopCurrent(&ours));
}

void Device::copy_down(void* to, DeviceAddress from, size_t bytes, CudaStream stream) const {
  check(driver_.cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync");
}

void Device::copy_up(DeviceAddress to, const void* from, size_t bytes, CudaStream stream) const {
  check(driver_.cuMemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync");
}

void Device::copy_within(DeviceAddress to, DeviceAddress from, size_t bytes,
                         CudaStream stream) const {
  check(driver_.cuMemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync");
}

void Device::wait(CudaStream stream, CudaEvent event) const {
  check(driver_.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
}

void Device::record(CudaEvent event, CudaStream stream) const {
  check(driver_.cuEventRecord(event, stream), "cuEventRecord");
}

void Device::write(CudaStream stream, DeviceAddress word, uint32_t value) const {
  check(driver_.cuStreamWriteValue32(stream, word, value, kWriteValueDefault),
        "cuStreamWriteValue32");
}

void Device::wait_for(CudaStream stream, DeviceAddress word, uint32_t value) const {
  check(driver_.cuStreamWaitValue32(stream, word, value, kWaitValueAtLeast), "cuStreamWaitValue32");
}

bool Device::is_capturing(CudaStream stream) const {
  int status = 0;
  check(driver_.cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

bool Device::is_done(CudaEvent event) const {
  const CudaResult code = driver_.cuEventQuery(event);
  if (code == kNotReady) return false;
  check(code, "cuEventQuery");
  return true;
}

bool Device::is_lost(CudaEvent any) const noexcept {
  const CudaResult code = driver_.cuEventQuery(any);
  // Permanent errors. Others affect this call alone, for example while another thread captures a
  // graph.
  return code == kDeinitialized || code == kInvalidContext || code == kUnknown ||
         (code >= kFirstLasting && code <= kLastLasting);
}

bool Device::drains(CudaStream stream, CudaEvent event, const Deadline& deadline) const noexcept {
  if (driver_.cuEventRecord(event, stream) != kSuccess) return is_lost(event);
  while (driver_.cuEventQuery(event) == kNotReady) {
    if (deadline.passed()) return false;
    pause_ms(1);
  }
  return true;
}

void Device::synchronize(CudaStream stream) const {
  check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

CudaStream Device::new_stream() const {
  CudaStream stream = nullptr;
  constexpr int kHighest = -1000;  // the driver uses the nearest that it has
  check(driver_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, kHighest),
        "cuStreamCreateWithPriority");
  return stream;
}

CudaEvent Device::new_event() const {
  CudaEvent event = nullptr;
  check(driver_.cuEventCreate(&event, kEventDisableTiming), "cuEventCreate");
  return event;
}

DeviceAddress Device::allocate(size_t bytes) const {
  DeviceAddress address = 0;
  check(driver_.cuMemAlloc(&address, bytes), "cuMemAlloc");
  return address;
}

void Device::register_memory(void* memory, size_t bytes) const {
  check(driver_.cuMemHostRegister(memory, bytes, kHostRegisterPortable | kHostRegisterDeviceMap),
        "cuMemHostRegister");
}

DeviceAddress Device::device_address(void* registered) const {
  DeviceAddress address = 0;
  check(driver_.cuMemHostGetDevicePointer(&address, registered, 0), "cuMemHostGetDevicePointer");
  return address;
}

void Device::destroy_stream(CudaStream stream) const noexcept {
  static_cast<void>(driver_.cuStreamDestroy(stream));
}

void Device::destroy_event(CudaEvent event) const noexcept {
  static_cast<void>(driver_.cuEventDestroy(event));
}

void Device::free(DeviceAddress address) const noexcept {
  static_cast<void>(driver_.cuMemFree(address));
}

void Device::unregister_memory(void* memory) const noexcept {
  static_cast<void>(driver_.cuMemHostUnregister(memory));
}

}  // namespace hsgd
