// Layers that flow up and down, with delays before every notification and on the way between nodes:
// versions never overtake what is still read, sums are complete, and all ranks get to the end.
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "network/transport/ordered_rma.hpp"
#include "onesided/tree/gradient_tree.hpp"
#include "support/check.hpp"
#include "support/cluster.hpp"

namespace {

using hsgd::Communicator;
using hsgd::NotifiedWindow;
using hsgd::Tree;

constexpr uint32_t kLayers = 3;
constexpr uint64_t kCount = 33;   // float32 numbers of a layer
constexpr uint64_t kBlock = 256;  // a line for the flags, then the numbers
constexpr uint64_t kPlace = 64;
constexpr uint64_t kReason = 128;
constexpr uint64_t kGivenUp = uint64_t{1} << 62;

// The memory of all ranks, as a network sees it.
struct Network {
  std::mutex mutex;
  std::vector<std::byte*> bases;
};

// Writes arrive in any order, some looks after they were started.
class LateWrites final : public hsgd::UnorderedWrites {
 public:
  LateWrites(Network& network, uint64_t seed) : network_(network), random_(seed) {}
  Ticket put(int target, const void* data, size_t bytes, size_t offset) override {
    return start({target, data, bytes, offset, false});
  }
  Ticket replace(int target, const uint64_t* version, size_t offset) override {
    return start({target, version, sizeof *version, offset, true});
  }
  bool done(Ticket ticket) override {
    Write& write = writes_[ticket];
    if (write.late > 0) return --write.late, false;
    std::byte* there = base_of(write.target) + write.offset;
    if (write.atomic) {
      uint64_t version = 0;
      std::memcpy(&version, write.data, sizeof version);
      reinterpret_cast<std::atomic<uint64_t>*>(there)->store(version);
    } else {
      std::memcpy(there, write.data, write.bytes);
    }
    return true;
  }
  void reserve(size_t) override {}
  void flush(int) override {}
  void sync() override {}
  bool close(const hsgd::Deadline&) noexcept override { return true; }

 private:
  struct Write {
    int target;
    const void* data;
    size_t bytes;
    size_t offset;
    bool atomic;
    uint64_t late = 0;
  };
  Ticket start(Write write) {
    write.late = random_() % 4;
    writes_.push_back(write);
    return static_cast<Ticket>(writes_.size() - 1);
  }
  std::byte* base_of(int rank) {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    return network_.bases[static_cast<size_t>(rank)];
  }
  Network& network_;
  std::mt19937_64 random_;
  std::vector<Write> writes_;
};

// One rank: a node's first rank leads; leaders form a binomial tree up and a chain down, each layer
// with another root.
class Rank {
 public:
  Rank(Communicator& communicator, const ranks::Cluster& cluster, Network& network, int rank)
      : nodes_(cluster.ranks_on_nodes()),
        node_(static_cast<size_t>(cluster.place(rank).node_rank)),
        rank_(rank),
        size_(cluster.size()),
        own_(static_cast<uint64_t>(rank) + 1),
        communicator_(communicator),
        window_(communicator, settings(), [&](void* base, size_t) {
          const std::lock_guard<std::mutex> lock(network.mutex);
          network.bases[static_cast<size_t>(rank)] = static_cast<std::byte*>(base);
          return hsgd::make_ordered_rma(
              std::make_unique<LateWrites>(network, static_cast<uint64_t>(rank) + 77));
        }) {
    communicator.barrier();
  }

  void train(uint64_t steps) {
    struct Engine {
      Rank& rank;
      std::thread thread;
      ~Engine() {
        if (!thread.joinable()) return;
        rank.window_.put_notify({}, rank.rank_, 0, 1, 10);
        thread.join();
      }
    };
    Engine engine{*this, leads() ? std::thread([&] { work(); }) : std::thread()};
    for (uint64_t step = 1; step <= steps; ++step) take_step(step);
    for (uint32_t layer = 0; layer < kLayers; ++layer) check_weights(layer, steps);
    communicator_.barrier();  // other engines may still need this one
  }

  std::string engine_error;

 private:
  static float mean_of(uint64_t version, uint32_t layer, int size) {
    return static_cast<float>(version % 1000 + layer) + static_cast<float>(size + 1) / 2;
  }
  float gradient(uint64_t version, uint32_t layer) const {
    return static_cast<float>(version % 1000 + layer) + static_cast<float>(rank_ + 1);
  }
  static float weight(uint64_t version, uint32_t layer) {
    return static_cast<float>(version * 7 % 1009 + layer);
  }

  uint32_t inputs() const { return 2 + static_cast<uint32_t>(nodes_.size()) + most_local(); }
  uint32_t most_local() const {
    size_t most = 0;
    for (const auto& node : nodes_) most = std::max(most, node.size());
    return static_cast<uint32_t>(most);
  }
  NotifiedWindow::Settings settings() const {
    const uint64_t blocks = 2 + nodes_.size();
    return {kReason + kLayers * blocks * kBlock, 1 + kLayers * inputs(), 64, 30, false, false};
  }
  uint32_t slot(uint32_t layer, uint32_t which) const { return 1 + layer * inputs() + which; }
  uint64_t place(uint32_t layer, uint64_t which) const {
    return kReason + (layer * (2 + nodes_.size()) + which) * kBlock;
  }
  int leader(size_t node) const { return nodes_[node].front(); }
  bool leads() const { return leader(node_) == rank_; }
  static size_t root(uint32_t layer, size_t nodes) { return layer % nodes; }
  // This rank's node in the trees of node 0, and the leader of one of their nodes.
  size_t turned(uint32_t layer) const {
    return (node_ + nodes_.size() - root(layer, nodes_.size())) % nodes_.size();
  }
  int leader(uint32_t layer, size_t turned) const {
    return leader((turned + root(layer, nodes_.size())) % nodes_.size());
  }
  static size_t parent(size_t node) {
    size_t top = 1;
    while (2 * top <= node) top *= 2;
    return node - top;
  }
  uint32_t own_slot(uint32_t layer) const {
    const auto& local = nodes_[node_];
    const auto place = std::find(local.begin(), local.end(), rank_) - local.begin();
    const auto first = 2 + static_cast<uint32_t>(nodes_.size());
    return slot(layer, place == 0 ? 1 : first + static_cast<uint32_t>(place));
  }

  Tree::Layer layer_of(uint32_t layer) const {
    Tree::Layer its;
    its.numbers = {{kPlace, 5, HSGD_FLOAT32}, {kPlace + 20, kCount - 5, HSGD_FLOAT32}};
    its.flags = 2;
    its.gradients.push_back({slot(layer, 1), rank_, place(layer, 0)});
    const auto& local = nodes_[node_];
    for (uint32_t other = 1; other < local.size(); ++other) {
      const auto which = 2 + static_cast<uint32_t>(nodes_.size()) + other;
      its.gradients.push_back({slot(layer, which), local[other], place(layer, 0)});
    }
    const size_t node = turned(layer);
    for (size_t child = node + 1; child < nodes_.size(); ++child) {
      if (parent(child) != node) continue;
      its.gradients.push_back(
          {slot(layer, 2 + static_cast<uint32_t>(child)), rank_, place(layer, 2 + child)});
    }
    if (node > 0) {
      its.up.push_back({leader(layer, parent(node)), slot(layer, 2 + static_cast<uint32_t>(node)),
                        place(layer, 2 + node), kBlock});
    }
    its.weights = {slot(layer, 0), rank_, place(layer, 1)};
    if (node + 1 < nodes_.size()) {
      its.down.push_back({leader(layer, node + 1), slot(layer, 0), place(layer, 1), kBlock});
    }
    for (size_t other = 1; other < local.size(); ++other) {
      its.down.push_back({local[other], slot(layer, 0), 0, 0});
    }
    if (node == 0) its.down.push_back({rank_, slot(layer, 0), 0, 0});
    return its;
  }

  void work() {
    Tree::Settings settings{{}, static_cast<double>(size_), false, 0, kGivenUp, kReason};
    for (uint32_t layer = 0; layer < kLayers; ++layer) settings.layers.push_back(layer_of(layer));
    Tree tree(window_, std::move(settings));
    std::mt19937_64 random(static_cast<uint64_t>(rank_) + 1000);
    tree.before_notify([&] { ranks::dawdle(random); });
    try {
      tree.run([&](uint64_t version, const std::vector<uint32_t>& layers) {
        for (const uint32_t layer : layers) update(version, layer);
      });
    } catch (const hsgd::Error& error) {
      engine_error = error.what();
    }
  }

  void update(uint64_t version, uint32_t layer) {
    const std::byte* block = window_.segment(rank_) + place(layer, 0);
    CHECK(block[0] == std::byte{1} && block[1] == std::byte{static_cast<unsigned char>(size_ > 1)});
    const auto* mean = reinterpret_cast<const float*>(block + kPlace);
    for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(mean[i], mean_of(version, layer, size_));
    auto* weights = reinterpret_cast<float*>(window_.segment(rank_) + place(layer, 1));
    for (uint64_t i = 0; i < kCount; ++i) weights[i] = weight(version, layer);
  }

  void check_weights(uint32_t layer, uint64_t version) {
    if (version > 0) window_.wait_any({{slot(layer, 0), version - 1}}, 30);
    const auto* weights =
        reinterpret_cast<const float*>(window_.segment(leader(node_)) + place(layer, 1));
    const float wanted = version == 0 ? 0.0F : weight(version, layer);
    for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(weights[i], wanted);
  }

  void take_step(uint64_t step) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) check_weights(layer, step - 1);  // forward
    ranks::dawdle(own_);
    for (uint32_t layer = kLayers; layer-- > 0;) {
      check_weights(layer, step - 1);  // still: this rank has not sent its gradient
      std::byte* block = window_.segment(rank_) + place(layer, 0);
      block[0] = std::byte{1};
      block[1] = std::byte{static_cast<unsigned char>(rank_ == size_ - 1 && size_ > 1)};
      auto* numbers = reinterpret_cast<float*>(block + kPlace);
      for (uint64_t i = 0; i < kCount; ++i) numbers[i] = gradient(step, layer);
      ranks::dawdle(own_);
      window_.put_notify({}, leader(node_), own_slot(layer), step, 30);
    }
  }

  const std::vector<std::vector<int>> nodes_;
  const size_t node_;
  const int rank_;
  const int size_;
  std::mt19937_64 own_;
  Communicator& communicator_;
  NotifiedWindow window_;
};

void train(const std::vector<int>& layout, uint64_t steps) {
  const ranks::Cluster cluster{layout, ranks::small_steps(), {}};
  Network network;
  network.bases.resize(static_cast<size_t>(cluster.size()));
  cluster.run([&](int rank, std::unique_ptr<Communicator>& communicator) {
    Rank its(*communicator, cluster, network, rank);
    its.train(steps);
    CHECK_EQ(its.engine_error, "");
    communicator->barrier();  // nobody leaves while others may still read what it has
  });
}

constexpr uint64_t kSteps = ranks::kOperations > 1000 ? 10'000 : 1'000;  // fewer when sanitized

TEST("delays at every notification never mix versions nor stop anybody: ranks of one node") {
  train({1}, 100);
  train({3}, kSteps);
}

TEST("delays at every notification never mix versions nor stop anybody: between nodes") {
  for (const auto& layout : ranks::kLayouts) train(layout, ranks::kOperations / 10);
  train({1, 1}, kSteps);
}

}  // namespace
