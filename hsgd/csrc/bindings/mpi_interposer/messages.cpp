// Reads the flag, which is in the library that the program calls.
#include "bindings/mpi_interposer/messages.hpp"

#include <atomic>

#include "hsgd_core.h"

namespace hsgd::pmpi {
namespace {

// nullptr until it is attached, before any collective reaches this library: by all threads that
// make the first one, with the same value. Relaxed: bindings/mpi_preload/forward.hpp publishes the
// functions of this library with a release after it.
std::atomic<std::atomic<bool>*> noted{nullptr};

}  // namespace

bool has_messages() {
  const std::atomic<bool>* const flag = noted.load(std::memory_order_relaxed);
  return flag != nullptr && flag->load(std::memory_order_relaxed);
}

void note_messages() {
  std::atomic<bool>* const flag = noted.load(std::memory_order_relaxed);
  if (flag != nullptr && !has_messages()) flag->store(true, std::memory_order_relaxed);
}

}  // namespace hsgd::pmpi

extern "C" HSGD_API void hsgd_pmpi_attach(std::atomic<bool>* noted) {
  hsgd::pmpi::noted.store(noted, std::memory_order_relaxed);
}
