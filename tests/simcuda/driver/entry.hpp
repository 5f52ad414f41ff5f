// What each function of the interface does first: what the real driver checks, in one place.
//
// Owns the devices, their contexts, and the stack of contexts of each thread.
#ifndef SIMCUDA_DRIVER_ENTRY_HPP_
#define SIMCUDA_DRIVER_ENTRY_HPP_

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "streams.hpp"

namespace simcuda {

class Devices {
 public:
  // As SIMCUDA_DEVICES and SIMCUDA_GPU say.
  Devices();
  bool initialize();  // false: there is no device
  bool initialized() const;
  int count() const { return static_cast<int>(contexts_.size()); }
  // nullptr: there is none.
  Context* context_of(int device) const;
  Context* context_at(CUcontext handle) const;
  void recover();
  int attribute(int which);
  void set_attribute(int which, int value);

 private:
  std::vector<std::unique_ptr<Context>> contexts_;
  std::atomic<int> pid_{0};  // of the process that called cuInit(): it does not reach past fork()
  std::mutex mutex_;
  std::map<int, int> attributes_;  // that are not 1
};

// Of this process; see faults().
Devices& devices();
// Of a thread; the last one is current. Without a destructor: those of other thread-local objects
// may call the driver.
struct ContextStack {
  Context* contexts[64];
  size_t count;
};
ContextStack& context_stack();

struct Entry {
  CUresult result = CUDA_SUCCESS;
  Context* context = nullptr;
  std::shared_ptr<Stream> stream;
  bool failed_before = false;  // the result is the error that sticks to the context

  bool refused() const { return result != CUDA_SUCCESS; }
  // With a failed context things can still be given back.
  bool refuses_release() const { return refused() && !failed_before; }
};

Entry enter_driver(const char* function);  // needs cuInit()
Entry enter(const char* function);         // and a context
// And a stream, where nothing is captured; its context is the entry's.
Entry enter_stream(const char* function, CUstream stream);

// Whether an error is one after which a context can do nothing more.
bool sticks(int code);

}  // namespace simcuda

#endif  // SIMCUDA_DRIVER_ENTRY_HPP_
