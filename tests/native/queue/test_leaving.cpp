// Ranks that leave, between nodes over the in-process transport: what all had called ends well, and
// whoever calls more is told who left. Farewells overtake the messages of collectives there.
#include <chrono>
#include <set>

#include "bindings/c/handles.hpp"
#include "support/cluster.hpp"

namespace {

using ranks::Cluster;
using ranks::kLayouts;
using ranks::status_of;

constexpr uint64_t kCounts[] = {3, 3000, 0, 700};  // whole, and in several steps
constexpr int kLatePolls = 30;

void sum(hsgd::Communicator& comm, uint64_t count) {
  std::vector<double> data(count, 1.0);
  comm.allreduce(data.data(), data.data(), count, HSGD_FLOAT64, HSGD_SUM, nullptr);
  for (const double value : data) CHECK_EQ(value, 1.0 * comm.topology().size);
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

// The next collective says that `leaver` left, and how.
void check_told(hsgd::Communicator& comm, int leaver, const char* how) {
  try {
    sum(comm, 700);
    CHECK(!"a collective without all ranks ended well");
  } catch (const hsgd::Error& error) {
    CHECK_EQ(error.code(), HSGD_ERR_PEER_LOST);
    CHECK_EQ(error.rank(), leaver);
    const std::string line = error.what();
    CHECK(line.find(hsgd::text("rank %d ", leaver)) != std::string::npos);
    CHECK(line.find(how) != std::string::npos);
  }
  CHECK_EQ(status_of([&] { comm.barrier(); }), HSGD_ERR_PEER_LOST);
}

void leave(const Cluster& cluster, int leaver, bool ahead) {
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    for (const uint64_t count : kCounts) sum(*comm, count);
    if (rank != leaver) {
      if (ahead) pause();
      check_told(*comm, leaver, "closed its communicator");
    } else if (!ahead) {
      pause();
    }
  });
}

}  // namespace

TEST("a rank that leaves ahead of the others, or while they wait for it, is named to all") {
  uint64_t seed = 1;
  for (const auto& layout : kLayouts) {
    const Cluster cluster{layout, ranks::small_steps(), {1, seed++, kLatePolls}};
    for (int leaver = 0; leaver < cluster.size(); ++leaver) {
      for (const bool ahead : {false, true}) leave(cluster, leaver, ahead);
    }
  }
}

// By another thread's memory or over the wire: what arrives is one line, and bounded.
TEST("a rank that says why it leaves is quoted to all") {
  const std::string long_words(1000, 'x');
  for (const auto& layout : kLayouts) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 3, kLatePolls}};
    for (int leaver = 0; leaver < cluster.size(); ++leaver) {
      cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
        for (const uint64_t count : kCounts) sum(*comm, count);
        if (rank == leaver) return comm->explain_leaving("raised Error: a\nb\x1b" + long_words);
        check_told(*comm, leaver, ") raised Error: a b xxx");
      });
    }
  }
}

TEST("a large collective that misses a rank moves no data and ends on all ranks") {
  const Cluster cluster{{2, 1, 1}, ranks::small_steps(), {1, 5, kLatePolls}};
  for (int leaver = 0; leaver < cluster.size(); ++leaver) {
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      sum(*comm, 3000);
      if (rank == leaver) return;
      std::vector<double> data(50000, 1.0);
      CHECK_EQ(status_of([&] {
                 comm->allreduce(data.data(), data.data(), data.size(), HSGD_FLOAT64, HSGD_SUM,
                                 nullptr);
               }),
               HSGD_ERR_PEER_LOST);
      for (const double value : data) CHECK_EQ(value, 1.0);
    });
  }
}

namespace {

thread_local bool is_hurried = false;
int hurried() { return is_hurried ? 1 : 0; }

}  // namespace

TEST("a node that gives up in a collective harms no earlier one") {
  hsgd_options options = ranks::small_steps();
  options.interrupted = hurried;
  for (const auto& layout : kLayouts) {
    const Cluster cluster{layout, options, {1, 7, kLatePolls}};
    std::atomic<bool> gone{false};
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      for (const uint64_t count : kCounts) sum(*comm, count);
      if (rank == 0) {
        is_hurried = true;
        CHECK_EQ(status_of([&] { sum(*comm, 700); }), HSGD_ERR_INTERRUPTED);
        gone = true;
        return;
      }
      while (!gone) std::this_thread::yield();
      check_told(*comm, 0, "rank 0 was interrupted");
    });
  }
}

namespace {

// Broadcasts are under way until `gone`, and until their sender has looked at its peers since.
class HeldBroadcasts final : public hsgd::Transport {
 public:
  HeldBroadcasts(std::unique_ptr<hsgd::Transport> wire, const std::atomic<bool>* gone)
      : wire_(std::move(wire)), gone_(gone) {}

  int node_rank() const override { return wire_->node_rank(); }
  int node_count() const override { return wire_->node_count(); }
  Ticket send(int node, hsgd::Channel channel, const void* data, size_t bytes) override {
    const Ticket ticket = wire_->send(node, channel, data, bytes);
    if (channel == hsgd::Channel::kBroadcast) held_.insert(ticket);
    return ticket;
  }
  Ticket receive(int node, hsgd::Channel channel, void* data, size_t capacity_bytes) override {
    return wire_->receive(node, channel, data, capacity_bytes);
  }
  bool done(Ticket ticket) override {
    constexpr int kLooks = 3;  // the first of them may have begun before
    if (looks_ < kLooks && held_.count(ticket) > 0) return false;
    if (!wire_->done(ticket)) return false;
    held_.erase(ticket);
    return true;
  }
  int awaited_node() const override { return wire_->awaited_node(); }
  void part(const hsgd::Parting& parting) noexcept override { wire_->part(parting); }
  bool heard(hsgd::Parting* parting) override {  // a look at the peers ends with it
    const bool any = wire_->heard(parting);
    if (!any && *gone_) ++looks_;
    return any;
  }
  bool quiesce(const hsgd::Deadline& deadline) noexcept override {
    return wire_->quiesce(deadline);
  }

 private:
  std::unique_ptr<hsgd::Transport> wire_;
  const std::atomic<bool>* gone_;
  std::set<Ticket> held_;
  int looks_ = 0;
};

}  // namespace

TEST("a rank that gives up in the next collective harms no leader that still sends this one") {
  std::atomic<bool> gone{false};
  Cluster cluster{{3, 1}, ranks::small_steps(), {}};
  cluster.wrapped = [&](std::unique_ptr<hsgd::Transport> wire) {
    return std::make_unique<HeldBroadcasts>(std::move(wire), &gone);
  };
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    constexpr int kRoot = 1, kLeaver = 2;  // beside leader 0; all fits into the ring
    std::vector<double> data(1000, rank == kRoot ? 1.0 : 0.0);
    comm->broadcast(data.data(), data.size(), HSGD_FLOAT64, kRoot, nullptr);
    for (const double value : data) CHECK_EQ(value, 1.0);
    if (rank == kLeaver) return;
    check_told(*comm, kLeaver, "closed its communicator");
    if (rank == kRoot) gone = true;
  });
}

namespace {

struct Destroy {
  void operator()(hsgd_comm* comm) const { hsgd_comm_destroy(comm); }
};

}  // namespace

TEST("asynchronous calls end as blocking ones when a rank leaves") {
  constexpr size_t kTogether = 3;
  for (const auto& layout : kLayouts) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 11, kLatePolls}};
    const int leaver = cluster.size() - 1;
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& communicator) {
      const std::unique_ptr<hsgd_comm, Destroy> comm(hsgd::new_comm(std::move(communicator)));
      std::vector<double> data(3000, 1.0);
      hsgd_call call{};
      call.kind = HSGD_BROADCAST;
      call.in = call.out = data.data();
      call.count = data.size();
      call.dtype = HSGD_FLOAT64;
      hsgd_error error;
      std::vector<hsgd_request*> requests(kTogether + (rank == leaver ? 0 : 2));
      for (hsgd_request*& request : requests) {
        if (!CHECK_EQ(hsgd_comm_start(comm.get(), &call, &request, &error), HSGD_OK)) return;
      }
      for (size_t i = 0; i < requests.size(); ++i) {
        const int status = hsgd_request_wait(requests[i], -1, &error);
        CHECK_EQ(status, i < kTogether ? HSGD_OK : HSGD_ERR_PEER_LOST);  // of all later ones alike
        CHECK_EQ(error.rank, i < kTogether ? -1 : leaver);
        hsgd_request_free(requests[i]);
      }
    });
  }
}

// Nodes count their collectives alike only after it.
TEST("a rank whose set-up ends early is not said to have closed its communicator") {
  for (const bool ends : {false, true}) {
    const auto network = hsgd::make_inproc_network({2, 0, 0});
    const auto other = hsgd::make_inproc_transport(network, 0, 0);
    const Cluster cluster{{1, 1}, ranks::small_steps(), {1, 0, 0}};
    {
      hsgd::Context context(ranks::meeting_point(), nullptr, cluster.place(1),
                            hsgd::make_inproc_transport(network, 1, 0), cluster.options, nullptr);
      if (ends) context.end_setup(4096);
    }
    hsgd::Parting told;
    const bool closed = other->heard(&told) && told.how == hsgd::Parting::kClosed;
    CHECK_EQ(closed, ends);
  }
}
