// Device resources: pages for registered memory, and the pool of events.
#include "device/device_resources.hpp"

#include <sys/mman.h>

#include <utility>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

std::byte* new_pages(size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw_error(HSGD_ERR_MEMORY, -1,
                "no memory for a staging buffer of %zu bytes between device and host", bytes);
  }
  return static_cast<std::byte*>(memory);
}

}  // namespace

PinnedMemory::PinnedMemory(const Device& device, size_t bytes)
    : bytes_(bytes), data_(new_pages(bytes)) {
  try {
    registration_ = std::make_unique<Registration>(device, data_, bytes);
  } catch (...) {
    ::munmap(data_, bytes);
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  registration_.reset();
  ::munmap(data_, bytes_);
}

Signal::Signal(const Device& device)
    : memory_(device, 4096), address_(device.device_address(memory_.data())) {
  set(first_count_32());
}

EventPool::~EventPool() {  // runs in the thread that dropped the last work
  try {
    const Device::Current current(device_);
    free_.clear();
  } catch (const Error&) {  // no context any more: nothing left to release
    for (auto& event : free_) static_cast<void>(event.release());
  }
}

std::unique_ptr<OwnEvent> EventPool::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return std::make_unique<OwnEvent>(device_);
  std::unique_ptr<OwnEvent> event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void EventPool::give_back(std::unique_ptr<OwnEvent> event) {
  if (!owner_.is_this_process()) {  // forked: the device is not available, and the lock may be held
    static_cast<void>(event.release());
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(std::move(event));
}

}  // namespace hsgd
