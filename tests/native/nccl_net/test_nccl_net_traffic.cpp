// Random traffic through the network plugin of NCCL: ranks as threads, each with one loop over all
// of its connections as NCCL's proxy has. An exact model says what must arrive: plans are made
// before, from a seed, and both ends read the same plan.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/os/wait.hpp"
#include "support/check.hpp"
#include "support/nccl_proxy.hpp"

namespace {

using hsgd::nccl_net::kMostEagerBytes;
using hsgd::nccl_net::kMostGrouped;
using hsgd::nccl_net::kMostPieceBytes;
using hsgd::nccl_net::kSuccess;
using proxy::Handle;
using proxy::Net;
using proxy::net_of;
using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

constexpr size_t kSpare = 16;         // bytes of a buffer behind its capacity, never written
constexpr uint8_t kUntouched = 0xc3;  // what all bytes hold before a receive
constexpr size_t kBlock = 8;          // groups whose messages are sent in any order
constexpr size_t kOpenGroups = 12;    // more than a block: then no order of sends can hang

struct Message {
  int tag;
  size_t bytes;
  size_t capacity;
  uint8_t first;  // of its bytes, which count up
};
using Group = std::vector<Message>;

// What goes through one connection.
struct Plan {
  std::vector<Group> groups;      // in the order of the receives
  std::vector<Message> messages;  // in the order of the sends; per tag that of the receives
};

size_t random_bytes(Random& random) {
  constexpr std::array<size_t, 6> kEdges = {
      0, 1, kMostEagerBytes, kMostEagerBytes + 1, 65537, 3 * kMostEagerBytes};
  if (random() % 40 == 0) return kMostPieceBytes - 1 + random() % 3;
  if (random() % 3 == 0) return kEdges[random() % kEdges.size()];
  return random() % 8 == 0 ? random() % (1 << 20) : random() % 3000;
}

Plan make_plan(Random& random, size_t groups) {
  Plan plan;
  for (size_t begin = 0; begin < groups; begin += kBlock) {
    std::vector<Message> block;
    for (size_t i = begin; i < std::min(groups, begin + kBlock); ++i) {
      Group group;
      for (size_t count = 1 + random() % kMostGrouped; count > 0; --count) {
        const size_t bytes = random_bytes(random);
        const size_t more = random() % 2 == 0 ? 0 : random() % 5000;
        group.push_back(
            {static_cast<int>(random() % 3), bytes, bytes + more, static_cast<uint8_t>(random())});
      }
      block.insert(block.end(), group.begin(), group.end());
      plan.groups.push_back(std::move(group));
    }
    // Any order of tags; messages of one tag keep theirs.
    std::vector<int> tags;
    for (const Message& message : block) tags.push_back(message.tag);
    std::shuffle(tags.begin(), tags.end(), random);
    for (const int tag : tags) {
      const auto next = std::find_if(block.begin(), block.end(),
                                     [&](const Message& each) { return each.tag == tag; });
      plan.messages.push_back(*next);
      block.erase(next);
    }
  }
  return plan;
}

Bytes contents_of(const Message& message) {
  Bytes made(message.bytes);
  for (size_t i = 0; i < made.size(); ++i) made[i] = static_cast<uint8_t>(message.first + i % 251);
  return made;
}

// The sending end of a connection.
struct Source {
  const Plan* plan;
  void* comm = nullptr;
  size_t next = 0;
  std::vector<std::pair<void*, std::unique_ptr<Bytes>>> open{};

  bool is_finished() const { return next == plan->messages.size() && open.empty(); }
  void step(const Net& net, Random& random) {
    if (next < plan->messages.size() && random() % 2 == 0) {
      const Message& message = plan->messages[next];
      auto data = std::make_unique<Bytes>(contents_of(message));
      void* request = nullptr;
      CHECK_EQ(net.isend(comm, data->data(), message.bytes, message.tag, &request), kSuccess);
      if (request != nullptr) {
        open.emplace_back(request, std::move(data));
        ++next;
      }
    }
    if (open.empty()) return;
    auto& tested = open[random() % open.size()];
    int done = 0;
    CHECK_EQ(net.test(tested.first, &done, nullptr), kSuccess);
    if (done == 0) return;
    std::swap(tested, open.back());
    open.pop_back();
  }
};

// The receiving end of a connection.
struct Sink {
  struct Open {
    void* request;
    const Group* group;
    std::vector<Bytes> buffers;
  };
  const Plan* plan;
  void* listening = nullptr;
  void* comm = nullptr;
  size_t next = 0;
  std::vector<Open> open{};

  bool is_finished() const { return next == plan->groups.size() && open.empty(); }
  void step(const Net& net, Random& random) {
    if (next < plan->groups.size() && open.size() < kOpenGroups && random() % 2 == 0) post(net);
    if (open.empty()) return;
    const size_t index = random() % open.size();
    std::array<int, kMostGrouped> sizes{};
    int done = 0;
    CHECK_EQ(net.test(open[index].request, &done, sizes.data()), kSuccess);
    if (done == 0) return;
    check_contents(open[index], sizes.data());
    std::swap(open[index], open.back());
    open.pop_back();
  }

  void post(const Net& net) {
    const Group& group = plan->groups[next];
    Open made{nullptr, &group, {}};
    std::vector<void*> data;
    std::vector<size_t> capacity;
    std::vector<int> tags;
    for (const Message& message : group) {
      made.buffers.emplace_back(message.capacity + kSpare, kUntouched);
      data.push_back(made.buffers.back().data());
      capacity.push_back(message.capacity);
      tags.push_back(message.tag);
    }
    CHECK_EQ(net.irecv(comm, static_cast<int>(group.size()), data.data(), capacity.data(),
                       tags.data(), &made.request),
             kSuccess);
    if (made.request == nullptr) return;
    open.push_back(std::move(made));
    ++next;
  }

  static void check_contents(const Open& received, const int* sizes) {
    for (size_t i = 0; i < received.group->size(); ++i) {
      const Message& message = (*received.group)[i];
      Bytes expected = contents_of(message);
      expected.resize(message.capacity + kSpare, kUntouched);
      CHECK_EQ(sizes[i], static_cast<int>(message.bytes));
      CHECK(expected == received.buffers[i]);
    }
  }
};

struct Job {
  Job(int version_, size_t ranks_, size_t comms_, size_t groups, uint64_t seed_)
      : version(version_), ranks(ranks_), comms(comms_), seed(seed_) {
    Random random(seed);
    const size_t connections = ranks * ranks * comms;
    for (size_t i = 0; i < connections; ++i) plans.push_back(make_plan(random, groups));
    handles.resize(connections);
  }
  size_t connection(size_t from, size_t to, size_t comm) const {
    return (from * ranks + to) * comms + comm;
  }
  const int version;
  const size_t ranks;
  const size_t comms;
  const uint64_t seed;
  std::vector<Plan> plans;
  std::vector<Handle> handles;
};

// The connections of one rank with all ranks, itself included.
class Rank {
 public:
  Rank(Job& job, size_t rank)
      : job_(job), rank_(rank), net_(net_of(job.version)), random_(job.seed + rank) {
    CHECK_EQ(net_.init(&context_), kSuccess);
    for (size_t other = 0; other < job.ranks; ++other) {
      for (size_t comm = 0; comm < job.comms; ++comm) {
        const size_t in = job.connection(other, rank, comm);
        Sink sink{&job.plans[in]};
        CHECK_EQ(net_.listen(context_, 0, &job.handles[in], &sink.listening), kSuccess);
        sinks_.push_back(std::move(sink));
        sources_.push_back({&job.plans[job.connection(rank, other, comm)]});
      }
    }
  }

  // After all ranks were made.
  void run() {
    const hsgd::Deadline deadline(4 * proxy::kLimitS);
    connect(deadline);
    while (!is_finished() && !deadline.passed()) {
      const size_t index = random_() % sources_.size();
      if (!sources_[index].is_finished()) sources_[index].step(net_, random_);
      if (!sinks_[index].is_finished()) sinks_[index].step(net_, random_);
      if (random_() % 64 == 0) std::this_thread::yield();
    }
    CHECK(is_finished());
    for (Source& source : sources_) net_.close_send(source.comm);
    for (Sink& sink : sinks_) net_.close_recv(sink.comm);
    net_.finalize(context_);
  }

 private:
  void connect(const hsgd::Deadline& deadline) {
    bool missing = true;
    while (missing && !deadline.passed()) {
      missing = false;
      for (size_t i = 0; i < sources_.size(); ++i) {
        const size_t out = job_.connection(rank_, i / job_.comms, i % job_.comms);
        void** sender = &sources_[i].comm;
        Sink& sink = sinks_[i];
        if (*sender == nullptr) {
          CHECK_EQ(net_.connect(context_, 0, &job_.handles[out], sender), kSuccess);
        }
        if (sink.comm == nullptr) CHECK_EQ(net_.accept(sink.listening, &sink.comm), kSuccess);
        missing = missing || *sender == nullptr || sink.comm == nullptr;
      }
      std::this_thread::yield();
    }
    CHECK(!missing);
    for (Sink& sink : sinks_) net_.close_listen(std::exchange(sink.listening, nullptr));
  }

  bool is_finished() const {
    return std::all_of(sources_.begin(), sources_.end(),
                       [](const Source& source) { return source.is_finished(); }) &&
           std::all_of(sinks_.begin(), sinks_.end(),
                       [](const Sink& sink) { return sink.is_finished(); });
  }

  Job& job_;
  const size_t rank_;
  const Net net_;
  Random random_;
  void* context_ = nullptr;
  std::vector<Source> sources_;
  std::vector<Sink> sinks_;
};

void run(int version, size_t ranks, size_t comms, size_t groups, uint64_t seed) {
  Job job(version, ranks, comms, groups, seed);
  std::vector<std::unique_ptr<Rank>> all;
  for (size_t rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<Rank>(job, rank));
  std::vector<std::thread> threads;
  for (auto& rank : all) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& thread : threads) thread.join();
  CHECK(proxy::take_warnings().empty());
}

}  // namespace

TEST("two ranks with three connections each way exchange what was planned") {
  for (uint64_t seed = 1; seed <= 4; ++seed) run(12, 2, 3, 60, seed);
}

TEST("three ranks do so through the oldest table, which knows no context") { run(6, 3, 1, 40, 11); }

TEST("eight ranks do so") { run(11, 8, 1, 12, 12); }
