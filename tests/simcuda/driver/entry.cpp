// Devices, contexts, and the checks at the beginning of each call.
#include "entry.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "faults.hpp"

namespace simcuda {
namespace {

long number(const char* name, long other) {
  const char* text = std::getenv(name);
  return text == nullptr ? other : std::strtol(text, nullptr, 10);
}

// Alike in all processes that name the same GPU.
std::string uuid_of(long gpu) {
  std::string uuid("simcuda-gpu-");
  for (int shift = 24; shift >= 0; shift -= 8) uuid += static_cast<char>(gpu >> shift);
  return uuid;
}

// Calls that the state of process and thread refuses; the context is set where one is current.
Entry checked(bool needs_context) {
  Entry entry;
  if (in_host_function()) {
    record_violation("a host function of a stream called the driver");
    entry.result = CUDA_ERROR_NOT_PERMITTED;
  } else if (!devices().initialized()) {
    entry.result = CUDA_ERROR_NOT_INITIALIZED;
  } else if (needs_context) {
    entry.context = current_context();
    if (entry.context == nullptr) {
      entry.result = CUDA_ERROR_INVALID_CONTEXT;
    } else if (!entry.context->retained()) {
      entry.result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
  }
  return entry;
}

// Errors that a test asks for, and those of the context.
Entry with_errors(const char* function, Entry entry) {
  const int code = injected(function);
  if (entry.refused()) return entry;
  if (entry.context != nullptr && entry.context->failed()) {
    entry.result = entry.context->error();
    entry.failed_before = true;
  } else if (code != 0) {
    entry.result = static_cast<CUresult>(code);
    if (entry.context != nullptr && sticks(code)) entry.context->fail(entry.result);
  }
  return entry;
}

}  // namespace

void Context::fail(CUresult error) {
  int none = CUDA_SUCCESS;
  error_.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

bool Context::release() {
  if (retained_.fetch_sub(1) > 0) return true;
  ++retained_;
  return false;
}

Devices::Devices() {
  const long gpu = number("SIMCUDA_GPU", 0);
  for (long k = 0; k < number("SIMCUDA_DEVICES", 1); ++k) {
    contexts_.push_back(std::make_unique<Context>(static_cast<int>(k), uuid_of(gpu + k)));
  }
}

bool Devices::initialize() {
  if (contexts_.empty()) return false;
  int none = 0;
  pid_.compare_exchange_strong(none, ::getpid());
  return true;
}

bool Devices::initialized() const { return pid_.load() == ::getpid(); }

Context* Devices::context_of(int device) const {
  return device < 0 || device >= count() ? nullptr : contexts_[static_cast<size_t>(device)].get();
}

Context* Devices::context_at(CUcontext handle) const {
  for (const auto& context : contexts_) {
    if (context->handle() == handle) return context.get();
  }
  return nullptr;
}

void Devices::recover() {
  for (const auto& context : contexts_) context->recover();
}

int Devices::attribute(int which) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = attributes_.find(which);
  return found == attributes_.end() ? 1 : found->second;
}

void Devices::set_attribute(int which, int value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  attributes_[which] = value;
}

Devices& devices() {
  static auto* one = new Devices;
  return *one;
}

ContextStack& context_stack() {
  thread_local ContextStack stack{};
  return stack;
}

Context* current_context() {
  const ContextStack& stack = context_stack();
  return stack.count == 0 ? nullptr : stack.contexts[stack.count - 1];
}

Context* current_or_first_context() {
  Context* current = current_context();
  if (current != nullptr || !devices().initialize()) return current;
  return devices().context_of(0);
}

ScopedContext::ScopedContext(Context& context) {
  ContextStack& stack = context_stack();
  stack.contexts[stack.count++] = &context;
}

ScopedContext::~ScopedContext() { --context_stack().count; }

bool sticks(int code) {
  constexpr int kSticking[] = {
      CUDA_ERROR_ECC_UNCORRECTABLE,
      CUDA_ERROR_NVLINK_UNCORRECTABLE,
      CUDA_ERROR_ILLEGAL_ADDRESS,
      CUDA_ERROR_LAUNCH_TIMEOUT,
      CUDA_ERROR_ASSERT,
      CUDA_ERROR_HARDWARE_STACK_ERROR,
      CUDA_ERROR_ILLEGAL_INSTRUCTION,
      CUDA_ERROR_MISALIGNED_ADDRESS,
      CUDA_ERROR_INVALID_ADDRESS_SPACE,
      CUDA_ERROR_INVALID_PC,
      CUDA_ERROR_LAUNCH_FAILED,
  };
  return std::find(std::begin(kSticking), std::end(kSticking), code) != std::end(kSticking);
}

Entry enter_driver(const char* function) { return with_errors(function, checked(false)); }

Entry enter(const char* function) { return with_errors(function, checked(true)); }

Entry enter_stream(const char* function, CUstream stream) {
  Entry entry = checked(true);
  if (!entry.refused()) {
    entry.stream = streams().find(stream, *entry.context);
    if (entry.stream == nullptr) {
      record_violation(std::string(function) + ": no such stream");
      entry.result = CUDA_ERROR_INVALID_HANDLE;
    } else {
      entry.context = &entry.stream->context();
    }
  }
  entry = with_errors(function, std::move(entry));
  // Graphs are not simulated, so nothing can be captured.
  if (!entry.refused() && entry.stream->capturing.load() != CU_STREAM_CAPTURE_STATUS_NONE)
    entry.result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return entry;
}

CUresult enqueue(const char* function, CUstream stream, Work work) {
  const Entry entry = enter_stream(function, stream);
  if (entry.refused()) return entry.result;
  // Copies may go to a stream of another device; kernels may not.
  if (entry.context != current_context()) return CUDA_ERROR_INVALID_HANDLE;
  entry.stream->push(std::move(work));
  return CUDA_SUCCESS;
}

}  // namespace simcuda

void simcuda_recover() {
  simcuda::faults().forget();
  simcuda::devices().recover();
}

void simcuda_set_attribute(int attribute, int value) {
  simcuda::devices().set_attribute(attribute, value);
}
