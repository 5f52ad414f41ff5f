// Cases one after the other, each from one simulated moment on.
#include "program.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <simgrid/s4u.hpp>

#include "collective.hpp"
#include "simulated_time.hpp"

namespace simulation {
namespace {

// Beyond that in all, ranks share one vector.
constexpr uint64_t kOwnBytes = uint64_t{512} << 20;
// Between the barrier and the start: longer than a barrier takes.
constexpr double kLeadS = 0.1;

// In the first call some of SMPI's algorithms split communicators by node.
void warm_up(const Collectives& collectives) {
  const float in = 1;
  float out = 0;
  collectives.at("allreduce")({&in, &out, 1});
}

double now_s() { return simgrid::s4u::Engine::get_clock(); }

// Small whole numbers, whose sums over a thousand ranks are exact in float32.
float value_of(uint64_t index, int rank) {
  return static_cast<float>(index % 13) + static_cast<float>(rank % 7);
}

// What an element of the result is, where `shared` says whether all ranks gave the same values.
class Expected {
 public:
  Expected(const Arguments& arguments, int rank, bool shared, uint64_t count)
      : operation_(arguments.operation),
        ranks_(arguments.ranks),
        rank_(rank),
        shared_(shared),
        count_(count) {
    for (int each = 0; each < ranks_; ++each) of_ranks_ += shared ? 0 : value_of(0, each);
  }
  float at(uint64_t index) const {
    const uint64_t block = std::max<uint64_t>(1, count_ / static_cast<uint64_t>(ranks_));
    if (operation_ == "broadcast") return value_of(index, 0);
    const int from = shared_ ? 0 : static_cast<int>(index / block);
    if (operation_ == "allgather") return value_of(index % block, from);
    if (operation_ == "alltoall")
      return value_of(static_cast<uint64_t>(rank_) * block + index % block, from);
    return static_cast<float>(index % 13) * static_cast<float>(ranks_) + of_ranks_;
  }

 private:
  const std::string& operation_;
  const int ranks_;
  const int rank_;
  const bool shared_;
  const uint64_t count_;
  float of_ranks_ = 0;
};

}  // namespace

Program::Program(const Arguments& arguments)
    : arguments_(arguments), cases_(arguments.bytes.size()) {
  uint64_t most = 0;  // elements that ranks share
  for (const uint64_t bytes : arguments.bytes) {
    if (folds(bytes)) most = std::max(most, bytes / sizeof(float));
  }
  for (uint64_t i = 0; i < most; ++i) shared_.in.push_back(value_of(i, 0));
  shared_.out.resize(most);
}

bool Program::folds(uint64_t bytes) const {
  return 2 * bytes * static_cast<uint64_t>(arguments_.ranks) > kOwnBytes;
}

void Program::run_rank() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const auto collectives =
      arguments_.ours ? make_hsgd_collectives(arguments_.radix) : make_mpi_collectives();
  warm_up(collectives);
  for (size_t index = 0; index < cases_.size(); ++index) {
    const uint64_t bytes = arguments_.bytes[index];
    const uint64_t count = arguments_.operation == "barrier" ? 0 : bytes / sizeof(float);
    Buffers own;
    Buffers& buffers = folds(bytes) ? shared_ : own;
    for (uint64_t i = own.in.size(); i < count && !folds(bytes); ++i)
      own.in.push_back(value_of(i, rank));
    if (!folds(bytes)) own.out.assign(count, -1);
    if (rank == 0) std::copy_n(buffers.in.begin(), count, buffers.out.begin());  // broadcasts it
    const Vectors vectors{buffers.in.data(), buffers.out.data(), count};
    measure(collectives, vectors, &cases_[index]);
    check(vectors, rank, &cases_[index]);
    if (++cases_[index].finished == arguments_.ranks) print(index);
  }
}

void Program::measure(const Collectives& collectives, const Vectors& vectors, Case* one) const {
  PMPI_Barrier(MPI_COMM_WORLD);
  if (one->start_s < 0) one->start_s = now_s() + kLeadS;
  simgrid::s4u::this_actor::sleep_until(one->start_s);
  const double local_s =
      arguments_.local_s +
      arguments_.local_s_per_byte * static_cast<double>(vectors.count * sizeof(float));
  const Sent before = sent_by_this_rank();
  if (local_s > 0) simgrid::s4u::this_actor::sleep_for(local_s / 2);
  collectives.at(arguments_.operation)(vectors);
  if (local_s > 0) simgrid::s4u::this_actor::sleep_for(local_s / 2);
  const Sent after = sent_by_this_rank();
  one->end_s = std::max(one->end_s, now_s());
  one->most_messages = std::max(one->most_messages, after.messages - before.messages);
  one->most_bytes = std::max(one->most_bytes, after.bytes - before.bytes);
}

// Of shared vectors those that hold the same values on all ranks, by rank 0 alone. Peers use the
// result as working memory, which cannot be shared.
void Program::check(const Vectors& vectors, int rank, Case* one) const {
  const bool shared = folds(vectors.count * sizeof(float));
  const bool scattered = arguments_.operation == "reduce_scatter";
  const bool alike = !scattered && arguments_.operation != "alltoall";
  if (shared && (rank != 0 || !alike || !arguments_.ours)) return;
  const Expected expected(arguments_, rank, shared, vectors.count);
  const uint64_t block = vectors.count / static_cast<uint64_t>(arguments_.ranks);
  const uint64_t first = scattered ? static_cast<uint64_t>(rank) * block : 0;
  for (uint64_t i = 0; i < (scattered ? block : vectors.count); ++i) {
    one->right &= vectors.out[i] == expected.at(first + i);
  }
  one->checked = true;
}

void Program::print(size_t index) const {
  const Case& one = cases_[index];
  std::printf(
      "{\"bytes\": %llu, \"seconds\": %.9f, \"messages\": %llu, \"sent\": %llu, \"right\": %s}\n",
      static_cast<unsigned long long>(arguments_.bytes[index]), one.end_s - one.start_s,
      static_cast<unsigned long long>(one.most_messages),
      static_cast<unsigned long long>(one.most_bytes),
      one.checked ? (one.right ? "true" : "false") : "null");
  std::fflush(stdout);
}

}  // namespace simulation
