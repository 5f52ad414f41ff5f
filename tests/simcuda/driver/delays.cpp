// Random delays of work on streams: what makes a missing dependency show as wrong data.
//
// Owns the seed and the bound. Each thread of a stream draws its own sequence from them.
#include <sys/prctl.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <random>

#include "controls.hpp"
#include "internal.hpp"

namespace simcuda {
namespace {

constexpr uint32_t kDefaultMax_us = 200;
constexpr uint64_t kApart = 0x9e3779b97f4a7c15;  // seeds of neighbouring threads

struct Delays {
  std::mutex mutex;
  uint64_t seed = 0;
  uint32_t max_us = kDefaultMax_us;
  uint64_t threads = 0;     // that drew since the last setting
  uint64_t generation = 0;  // of the setting
};

uint64_t number(const char* name, uint64_t other) {
  const char* text = std::getenv(name);
  return text == nullptr ? other : std::strtoull(text, nullptr, 10);
}

Delays& delays() {
  static auto* one = [] {
    auto* fresh = new Delays;
    fresh->seed = number("SIMCUDA_SEED", 0);
    fresh->max_us = static_cast<uint32_t>(number("SIMCUDA_DELAY_US", kDefaultMax_us));
    return fresh;
  }();
  return *one;
}

// A third of the delays are none, a third short, a third long.
uint32_t draw(std::mt19937_64& random, uint32_t max_us) {
  const uint64_t kind = random() % 3;
  const uint64_t part = random() % (max_us + uint64_t{1});
  if (kind == 0) return 0;
  return static_cast<uint32_t>(kind == 1 ? part / 8 : max_us / 2 + part / 2);
}

}  // namespace

void pause() {
  thread_local std::mt19937_64 random;
  thread_local uint64_t generation = UINT64_MAX;
  uint32_t max_us = 0;
  {
    Delays& shared = delays();
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (generation != shared.generation) {
      ::prctl(PR_SET_TIMERSLACK, 1);  // ns: the kernel's default would add 50 us to each
      random.seed(shared.seed + kApart * ++shared.threads);
      generation = shared.generation;
    }
    max_us = shared.max_us;
  }
  if (max_us == 0) return;
  const uint32_t delay_us = draw(random, max_us);
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
}

}  // namespace simcuda

void simcuda_set_delays(uint64_t seed, uint32_t max_us) {
  simcuda::Delays& shared = simcuda::delays();
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.seed = seed;
  shared.max_us = max_us;
  shared.threads = 0;
  ++shared.generation;
}
