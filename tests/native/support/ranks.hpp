// Ranks as threads of one process, for the native tests.
//
// Owns the threads and, under the thread sanitizer, the mapping of segments: all ranks share one,
// because it sees no race between two mappings of the same memory.
#ifndef HSGD_TESTS_RANKS_HPP_
#define HSGD_TESTS_RANKS_HPP_

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/kernels/reduce.hpp"
#include "core/os/cpu_budget.hpp"
#include "core/os/shared_memory.hpp"
#include "core/topology/cpu_topology.hpp"
#include "hsgd_core.h"
#include "network/rounds/round_schedule.hpp"
#include "support/check.hpp"

#if defined(__SANITIZE_THREAD__)
namespace hsgd {

struct OneMapping {
  void* address = nullptr;
  int users = 0;
};

inline std::mutex& mappings_mutex() {
  static std::mutex mutex;
  return mutex;
}

inline std::map<ino_t, OneMapping>& mappings() {
  static std::map<ino_t, OneMapping> all;
  return all;
}

bool populate_shared(void*, int, size_t, size_t) { return true; }

void* map_shared(int fd, size_t bytes, bool) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) return MAP_FAILED;
  const std::lock_guard<std::mutex> lock(mappings_mutex());
  OneMapping& mapping = mappings()[status.st_ino];
  if (mapping.users++ == 0) {
    mapping.address = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE,
                             MAP_SHARED, fd, 0);
  }
  return static_cast<size_t>(status.st_size) < bytes ? MAP_FAILED : mapping.address;
}

void unmap_shared(void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mappings_mutex());
  for (auto it = mappings().begin(); it != mappings().end(); ++it) {
    if (it->second.address != address) continue;
    if (--it->second.users > 0) return;
    ::munmap(address, bytes);
    mappings().erase(it);
    return;
  }
}

}  // namespace hsgd
#endif

namespace ranks {

// How many cores the ranks of a test believe to have: with fewer than ranks they share out sums
// among those that run, with more each has its part.
inline std::atomic<int>& pretended_cores() {
  static std::atomic<int> cores{2};
  return cores;
}

struct WithCores {
  explicit WithCores(int cores) { pretended_cores() = cores; }
  ~WithCores() { pretended_cores() = 2; }
};

}  // namespace ranks

namespace hsgd {

// So that the memory of nodes is allocated as on machines of several.
int numa_nodes_with_cpus(const std::string&) { return 2; }

Cores own_cores() {
  Cores cores{};
  cores.quota = INT32_MAX;
  cores.affinity[0] = (uint64_t{1} << ranks::pretended_cores()) - 1;
  return cores;
}

}  // namespace hsgd

namespace ranks {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kOperations = 400;
#else
constexpr int kOperations = 1000;
#endif
// Of two dozen ranks, whose turns on few cores the thread sanitizer makes very long.
#if defined(__SANITIZE_THREAD__)
constexpr int kCrowdedCalls = 3;
#else
constexpr int kCrowdedCalls = 20;
#endif

inline std::string meeting_point() {
  static std::atomic<int> serial{0};
  return hsgd::text("@hsgd-native-%d-%d", static_cast<int>(::getpid()), serial++);
}

// Runs body(rank) in `size` threads; whatever one throws is a failed check.
inline void run(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        check::report(false, "rank", rank, std::string("threw ") + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Small steps, so that short payloads take many.
inline hsgd_options small_steps(double timeout_s = 60) {
  hsgd_options options;
  hsgd_options_default(&options);
  options.timeout_s = timeout_s;
  options.oneshot_bytes = 256;
  options.chunk_bytes = 4096;
  options.wire_oneshot_bytes = 256;
  options.wire_chunk_bytes = 4096;
  options.slots = 3;
  options.nontemporal = 0;
  return options;
}

// One operation of a random program, the same on all ranks.
struct Operation {
  enum class Kind { kAllreduce, kBroadcast, kBarrier } kind;
  hsgd_dtype dtype;
  hsgd_op op;
  uint64_t count;
  int root;
  bool in_place;
  uint64_t seed;
  size_t bytes() const { return count * hsgd_dtype_bytes(dtype); }
};

inline Operation draw(std::mt19937_64& program, int size) {
  const auto below = [&](uint64_t n) { return program() % n; };
  constexpr hsgd_op kOps[] = {HSGD_SUM, HSGD_MIN, HSGD_MAX, HSGD_PROD};
  constexpr uint64_t kMost[] = {2, 70, 300, 5000, 40000};
  Operation operation{};
  operation.kind = below(10) < 6   ? Operation::Kind::kAllreduce
                   : below(10) < 7 ? Operation::Kind::kBroadcast
                                   : Operation::Kind::kBarrier;
  operation.dtype = static_cast<hsgd_dtype>(below(HSGD_DTYPE_COUNT));
  operation.op = kOps[below(4)];
  operation.count = below(kMost[below(5)]);
  operation.root = static_cast<int>(below(static_cast<uint64_t>(size)));
  operation.in_place = below(2) == 0;
  operation.seed = program();
  return operation;
}

// A rank's input: any bits, but no signalling NaN, whose sum depends on the instruction set.
inline std::vector<std::byte> input_of(const Operation& operation, int rank) {
  std::vector<std::byte> bytes(operation.bytes());
  std::mt19937_64 random(operation.seed + static_cast<uint64_t>(rank) * 7919);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 120);
  return bytes;
}

inline std::vector<std::byte> reduced(const Operation& operation,
                                      const std::vector<std::vector<std::byte>>& inputs) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<std::byte> result(operation.bytes());
  hsgd_error error;
  CHECK_EQ(hsgd_reduce(pointers.data(), static_cast<int>(pointers.size()), result.data(),
                       operation.count, operation.dtype, operation.op, &error),
           HSGD_OK);
  return result;
}

// The ranks of each node when they are numbered node by node.
inline std::vector<std::vector<int>> in_a_row(const std::vector<int>& ranks_of_node) {
  std::vector<std::vector<int>> nodes;
  int rank = 0;
  for (const int count : ranks_of_node) {
    nodes.emplace_back();
    for (int i = 0; i < count; ++i) nodes.back().push_back(rank++);
  }
  return nodes;
}

// float32 to a 16-bit format, or back.
inline std::vector<std::byte> converted(const std::vector<std::byte>& bytes, hsgd_dtype from,
                                        hsgd_dtype to) {
  const size_t count = bytes.size() / hsgd_dtype_bytes(from);
  std::vector<std::byte> result(count * hsgd_dtype_bytes(to));
  const hsgd::Isa plain = hsgd::Isa::kPlain;
  if (from == HSGD_FLOAT32) {
    hsgd::select_conversion(to, plain).narrow(result.data(), bytes.data(), count);
  } else {
    hsgd::select_conversion(from, plain).widen(result.data(), bytes.data(), count);
  }
  return result;
}

// The sums of nodes, in the order of the schedule: few nodes left to right, more in groups. 16-bit
// floats are float32 on the way.
inline std::vector<std::byte> reduced_over_nodes(const Operation& operation,
                                                 std::vector<std::vector<std::byte>> sums,
                                                 int radix) {
  const hsgd::RoundSchedule rounds(static_cast<int>(sums.size()), radix);
  const bool widens = operation.dtype == HSGD_FLOAT16 || operation.dtype == HSGD_BFLOAT16;
  Operation wide = operation;
  if (widens) wide.dtype = HSGD_FLOAT32;
  if (widens) {
    for (auto& sum : sums) sum = converted(sum, operation.dtype, HSGD_FLOAT32);
  }
  std::vector<std::vector<std::byte>> groups;
  for (int node = 0; node < rounds.nodes(); ++node) {
    const auto index = static_cast<size_t>(node);
    if (!rounds.is_core(node)) continue;
    const bool folds = rounds.partner(node) >= 0;
    groups.push_back(folds ? reduced(wide, {sums[index], sums[index + 1]}) : sums[index]);
  }
  for (int round = 0; round < rounds.rounds(); ++round) {
    std::vector<std::vector<std::byte>> next;
    const auto radix_here = static_cast<std::ptrdiff_t>(rounds.radix(round));
    for (auto first = groups.begin(); first != groups.end(); first += radix_here) {
      next.push_back(reduced(wide, {first, first + radix_here}));
    }
    groups = std::move(next);
  }
  return widens ? converted(groups.at(0), HSGD_FLOAT32, operation.dtype) : groups.at(0);
}

// What everybody must hold after an allreduce: ranks of a node left to right, then nodes, between
// which float32 may be narrowed.
inline std::vector<std::byte> expected(const Operation& operation,
                                       const std::vector<std::vector<int>>& ranks_on_nodes,
                                       hsgd_dtype narrow = HSGD_FLOAT32, int radix = 16) {
  std::vector<std::vector<std::byte>> nodes;
  for (const std::vector<int>& ranks : ranks_on_nodes) {
    std::vector<std::vector<std::byte>> inputs;
    for (const int rank : ranks) inputs.push_back(input_of(operation, rank));
    nodes.push_back(reduced(operation, inputs));
  }
  if (nodes.size() == 1) return nodes[0];
  if (narrow == HSGD_FLOAT32 || operation.dtype != HSGD_FLOAT32)
    return reduced_over_nodes(operation, std::move(nodes), radix);
  for (auto& node : nodes) node = converted(node, HSGD_FLOAT32, narrow);
  Operation between = operation;
  between.dtype = narrow;
  return converted(reduced_over_nodes(between, std::move(nodes), radix), narrow, HSGD_FLOAT32);
}

// Something for other threads to run meanwhile, at random moments.
inline void dawdle(std::mt19937_64& own) {
  if (own() % 16 == 0) std::this_thread::yield();
  if (own() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
}

}  // namespace ranks

#endif  // HSGD_TESTS_RANKS_HPP_
