// Layers that flow through a notified window: gradients up a tree, weights down another.
//
// Owns what a rank does when a notification arrives: sum what has come in a fixed order, pass the
// sum on or have it made into weights, pass weights on. A layer is whatever goes up and comes down
// by itself: one of the model's, or a part of one. Never knows the shape of the trees, the model or
// the optimizer, and has no thread of its own: run() works in its caller's. Source: CaffeGPI
// (arXiv:1706.00095), our reconstruction.
//
// Flow control needs no acknowledgements. A rank writes its gradient of version v of a layer only
// when it has the weights of version v - 1, which are made from everybody's gradient of v - 1: the
// place that it overwrites was read. Weights of version v are made when everybody's gradient of v
// is there: nobody uses the weights that they overwrite, nor passes them on. tests/models/tree.pml
// checks this, and that it fails without either rule.
#ifndef HSGD_ONESIDED_TREE_GRADIENT_TREE_HPP_
#define HSGD_ONESIDED_TREE_GRADIENT_TREE_HPP_

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels/reduce.hpp"
#include "core/kernels/sgd_update.hpp"
#include "onesided/window/notified_window.hpp"

namespace hsgd {

class HSGD_API Tree final {
 public:
  // A gradient block: where a rank of this node finds it, and the slot that tells of it.
  struct Input {
    uint32_t slot;
    int memory;  // the rank of this node in whose segment it lies
    uint64_t offset;
  };
  struct Output {
    int target;
    uint32_t slot;
    uint64_t offset;
    uint64_t bytes;  // 0: the target is only told
  };
  // Numbers within a gradient block.
  struct Numbers {
    uint64_t place;
    uint64_t count;
    hsgd_dtype dtype;
  };
  struct Layer {
    std::vector<Numbers> numbers;
    uint32_t flags;                // bytes at the beginning of a block; a sum has those of all
    std::vector<Input> gradients;  // added in this order; the sum lies in the first
    std::vector<Output> up;        // the block of the sum; none: it becomes weights here
    Input weights;                 // watched unless they are made here
    std::vector<Output> down;      // the weights, in the order in which they go
  };
  struct Settings {
    std::vector<Layer> layers;  // what is needed first comes first
    double divisor;             // of sums that become weights
    bool whole_step;            // weights are made of all layers at once
    uint32_t stop_slot;         // any version there ends run()
    uint64_t given_up;          // versions from here on, in any slot: another rank gave up
    uint64_t reason_bytes;      // at the beginning of the segment: why, in words
  };
  // Makes weights of these layers' sums, in place, where elements() cannot. May throw.
  using Update = std::function<void(uint64_t version, const std::vector<uint32_t>& layers)>;

  // Local. `window` outlives this object.
  Tree(NotifiedWindow& window, Settings settings);

  // Blocks until the stop slot is notified. Throws what ends the tree: HSGD_ERR_PEER_LOST with what
  // another rank wrote when it gave up, or the death of a rank of this node; HSGD_ERR_TIMEOUT when
  // another node does not take what is sent; what `update` throws.
  void run(const Update& update);

  // What makes weights without a call of `update`, once it was told how.
  ElementUpdate& elements() { return elements_; }

  // What went to other nodes lately, the oldest first; any thread may ask. Times of now_ns().
  struct Sent {
    uint32_t layer;
    int target;
    int64_t begin_ns;
    int64_t end_ns;  // when it was known to have arrived
  };
  std::vector<Sent> sent() const;

  // For tests: called before every notification.
  void before_notify(std::function<void()> call) { before_notify_ = std::move(call); }

 private:
  struct Watched {
    uint32_t layer;
    bool weights;
  };
  // Something to send, the least layer first.
  struct Parcel {
    uint32_t layer;
    uint64_t version;
    const Output* output;
    const std::byte* data;
  };
  struct Flight {
    uint64_t ticket;
    uint64_t bytes;
    Sent sent;
  };
  // What goes to one target. The window is for networks that keep no order.
  struct Lane {
    std::vector<Parcel> parcels;
    std::deque<Flight> flights;
    uint64_t flying_bytes = 0;
    uint64_t window_bytes;
  };

  void watch(uint32_t layer, const Input& input, bool weights);
  void take(const NotifiedWindow::Seen& seen, const Update& update);
  void gather(uint32_t layer, const Update& update);
  void sum_up(const Layer& layer, double divisor) const;
  void make_weights(uint32_t layer, uint64_t version, const Update& update);
  bool update_elements(uint32_t layer, uint64_t version);
  void pass_on(uint32_t layer, uint64_t version);
  void post(uint32_t layer, uint64_t version, const Output& output, const std::byte* data);
  void send_all();
  bool has_parcels() const;
  bool has_room(const Lane& lane) const;
  bool send_from(Lane& lane);
  void land(Lane& lane);
  void note(const Sent& sent);
  bool has_landed();
  bool calm() const;
  uint64_t version_at(uint32_t slot) const;
  std::byte* block(const Input& input) const;
  std::string reason() const;

  NotifiedWindow& window_;
  const Settings settings_;
  const Isa isa_ = detect_isa();
  std::vector<NotifiedWindow::Seen> seen_;  // in the order in which they are served
  std::vector<Watched> watched_;            // the same
  std::vector<uint32_t> index_of_slot_;
  std::vector<uint64_t> gathered_;  // the version that has gone up, by layer
  std::vector<uint64_t> arrived_;   // the version of the weights here, by layer
  std::vector<uint32_t> held_;      // layers whose sums wait for the others; with whole_step
  ElementUpdate elements_;
  std::vector<int> targets_;  // of lanes_
  std::vector<Lane> lanes_;
  mutable std::mutex sent_mutex_;
  std::deque<Sent> sent_;
  std::function<void()> before_notify_;
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_TREE_GRADIENT_TREE_HPP_
