// Streams, events and registered memory of a device, released by their destructors.
//
// All calls need the device's context current, except those on the words of Signals, which the
// processor reads and writes.
#ifndef HSGD_DEVICE_DEVICE_RESOURCES_HPP_
#define HSGD_DEVICE_DEVICE_RESOURCES_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/os/fork_guard.hpp"
#include "device/device.hpp"

namespace hsgd {

class OwnStream {
 public:
  explicit OwnStream(const Device& device) : device_(device), stream_(device.new_stream()) {}
  ~OwnStream() { device_.destroy_stream(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator CudaStream() const { return stream_; }  // NOLINT: it is one

 private:
  const Device& device_;
  CudaStream stream_;
};

class OwnEvent {
 public:
  explicit OwnEvent(const Device& device) : device_(device), event_(device.new_event()) {}
  ~OwnEvent() { device_.destroy_event(event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  operator CudaEvent() const { return event_; }  // NOLINT: it is one

 private:
  const Device& device_;
  CudaEvent event_;
};

// Registers memory of another owner, so that the device can copy from and to it without the
// processor.
class Registration {
 public:
  Registration(const Device& device, std::byte* memory, size_t bytes)
      : device_(device), memory_(memory) {
    device.register_memory(memory, bytes);
  }
  ~Registration() { device_.unregister_memory(memory_); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  const Device& device_;
  std::byte* memory_;
};

// Registered memory with its own pages, zero at first. Throws HSGD_ERR_MEMORY.
class PinnedMemory {
 public:
  PinnedMemory(const Device& device, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* data_;
  std::unique_ptr<Registration> registration_;
};

// A number that only grows, modulo 2^32, in memory that both processor and device see.
class Signal {
 public:
  explicit Signal(const Device& device);
  DeviceAddress address() const { return address_; }
  bool has_come(uint32_t value) const {
    return static_cast<int32_t>(word().load(std::memory_order_acquire) - value) >= 0;
  }
  void set(uint32_t value) { word().store(value, std::memory_order_release); }

 private:
  std::atomic<uint32_t>& word() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(memory_.data());
  }
  PinnedMemory memory_;
  DeviceAddress address_;
};

// A pool of reused events: a wait for an event covers what was recorded when the wait was queued.
class EventPool {
 public:
  explicit EventPool(const Device& device) : device_(device) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  std::unique_ptr<OwnEvent> take();
  void give_back(std::unique_ptr<OwnEvent> event);

 private:
  Owner owner_;
  const Device& device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<OwnEvent>> free_;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_DEVICE_RESOURCES_HPP_
