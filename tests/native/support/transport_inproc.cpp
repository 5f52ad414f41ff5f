// The in-process implementation of Transport: queues under one mutex.
#include "support/transport_inproc.hpp"

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.hpp"

namespace hsgd {

class InprocNetwork {
 public:
  explicit InprocNetwork(const InprocOptions& options) : options_(options), random_(options.seed) {}

  struct Message {
    std::vector<std::byte> bytes;
    int late = 0;  // how many more times its receiver looks in vain
  };
  using Key = std::tuple<int, int, int, Channel>;  // lane, from, to, channel

  int node_count() const { return options_.node_count; }

  void put(const Key& key, const void* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* first = static_cast<const std::byte*>(data);
    queues_[key].push_back({std::vector<std::byte>(first, first + bytes), lateness()});
  }

  // Fills `data` with the next message, or says false when there is none yet.
  bool take(const Key& key, void* data, size_t capacity_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Message>& queue = queues_[key];
    if (queue.empty() || queue.front().late-- > 0) return false;
    const std::vector<std::byte>& bytes = queue.front().bytes;
    HSGD_CHECK(bytes.size() <= capacity_bytes);
    if (!bytes.empty()) std::memcpy(data, bytes.data(), bytes.size());
    queue.pop_front();
    return true;
  }

  void part(int lane, int node, const Parting& parting) {
    const std::lock_guard<std::mutex> lock(mutex_);
    partings_.push_back({lane, node, parting});
  }

  // The next parting that `node` is to hear, which has looked at the first `*seen` of all.
  bool heard(int lane, int node, size_t* seen, Parting* parting) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (*seen < partings_.size()) {
      const Farewell& next = partings_[(*seen)++];
      if (next.lane != lane || next.node == node) continue;
      *parting = next.parting;
      return true;
    }
    return false;
  }

 private:
  struct Farewell {
    int lane;
    int node;
    Parting parting;
  };

  int lateness() {
    if (options_.seed == 0) return 0;
    return std::uniform_int_distribution<int>(0, options_.most_late_polls)(random_);
  }

  const InprocOptions options_;
  std::mutex mutex_;  // guards all below
  std::mt19937_64 random_;
  std::map<Key, std::deque<Message>> queues_;
  std::vector<Farewell> partings_;  // overtake all messages
};

namespace {

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<InprocNetwork> network, int node, int lane)
      : network_(std::move(network)), node_(node), lane_(lane) {}

  int node_rank() const override { return node_; }
  int node_count() const override { return network_->node_count(); }

  // Sent at once, so the buffer is free; still, as over MPI, only done() says so.
  Ticket send(int node, Channel channel, const void* data, size_t bytes) override {
    network_->put({lane_, node_, node, channel}, data, bytes);
    return enter({true, true, {}, nullptr, 0});
  }

  Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) override {
    return enter({true, false, {lane_, node, node_, channel}, data, capacity_bytes});
  }

  bool done(Ticket ticket) override {
    Posted& posted = posted_[ticket];
    HSGD_CHECK(posted.used);
    if (!posted.complete && is_next(ticket)) {
      posted.complete = network_->take(posted.key, posted.data, posted.capacity_bytes);
    }
    posted.used = !posted.complete;
    return posted.complete;
  }

  int awaited_node() const override {
    const Posted* first = nullptr;
    for (const Posted& posted : posted_) {
      const bool waits = posted.used && !posted.complete;
      if (waits && (first == nullptr || posted.serial < first->serial)) first = &posted;
    }
    return first == nullptr ? -1 : std::get<1>(first->key);
  }

  void part(const Parting& parting) noexcept override {
    if (!std::exchange(parted_, true)) network_->part(lane_, node_, parting);
  }
  bool heard(Parting* parting) override {
    return network_->heard(lane_, node_, &partings_seen_, parting);
  }
  bool quiesce(const Deadline&) noexcept override {
    posted_.clear();
    return true;
  }

 private:
  struct Posted {
    bool used;
    bool complete;
    InprocNetwork::Key key;
    void* data;
    size_t capacity_bytes;
    uint64_t serial = 0;
  };

  Ticket enter(Posted posted) {
    posted.serial = serial_++;
    Ticket ticket = 0;
    while (ticket < posted_.size() && posted_[ticket].used) ++ticket;
    if (ticket == posted_.size()) posted_.emplace_back();
    posted_[ticket] = posted;
    return ticket;
  }

  // Receives of one channel are matched in the order of posting, whichever is asked for first.
  bool is_next(Ticket ticket) const {
    for (const Posted& other : posted_) {
      if (other.used && !other.complete && other.key == posted_[ticket].key &&
          other.serial < posted_[ticket].serial) {
        return false;
      }
    }
    return true;
  }

  std::shared_ptr<InprocNetwork> network_;
  const int node_;
  const int lane_;
  std::vector<Posted> posted_;
  uint64_t serial_ = 0;
  bool parted_ = false;
  size_t partings_seen_ = 0;
};

}  // namespace

std::shared_ptr<InprocNetwork> make_inproc_network(const InprocOptions& options) {
  return std::make_shared<InprocNetwork>(options);
}

std::unique_ptr<Transport> make_inproc_transport(std::shared_ptr<InprocNetwork> network, int node,
                                                 int lane) {
  return std::make_unique<InprocTransport>(std::move(network), node, lane);
}

}  // namespace hsgd
