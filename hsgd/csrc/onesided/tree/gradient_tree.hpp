// Tree: sends layers through a notified window: gradients up one tree, weights down another.
//
// Handles each notification of a rank: sums the arrived gradients in a fixed order, passes the sum
// on or has it made into weights, and passes weights on. A layer is a unit that travels by itself:
// a layer of the model or a part of one. Knows neither the shape of the trees nor the model nor the
// optimizer, and has no thread: run() works in its caller's. Source: CaffeGPI (arXiv:1706.00095),
// our reconstruction.
//
// Flow control needs no acknowledgements. A rank writes its gradient of version v of a layer only
// after it has the weights of version v - 1. These are made from all ranks' gradients of v - 1, so
// the place that it overwrites has been read. Weights of version v are made after all ranks'
// gradients of v have arrived, so no rank still uses or passes on the weights that they overwrite.
// tests/models/tree.pml checks this, and that it fails without either rule.
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
  // A gradient block: its place on this node, and the slot that announces it.
  struct Input {
    uint32_t slot;
    int memory;  // the rank of this node in whose segment it lies
    uint64_t offset;
  };
  struct Output {
    int target;
    uint32_t slot;
    uint64_t offset;
    uint64_t bytes;  // 0: the target is only notified
  };
  // The range of numbers in a gradient block.
  struct Numbers {
    uint64_t place;
    uint64_t count;
    hsgd_dtype dtype;
  };
  struct Layer {
    std::vector<Numbers> numbers;
    uint32_t flags;  // flag bytes at the beginning of a block; a sum has the flags of all
    std::vector<Input> gradients;  // added in this order; the sum lies in the first
    std::vector<Output> up;        // targets of the sum; empty: it becomes weights here
    Input weights;                 // watched, unless the weights are made here
    std::vector<Output> down;      // targets of the weights, in sending order
  };
  struct Settings {
    std::vector<Layer> layers;  // the layer that is needed first comes first
    double divisor;             // the divisor of sums that become weights
    bool whole_step;            // weights of all layers are made at once
    uint32_t stop_slot;         // any version there ends run()
    uint64_t given_up;  // versions from this one on, in any slot, mean that another rank gave up
    uint64_t reason_bytes;  // size of the text with the reason, at the beginning of the segment
  };
  // Makes weights from these layers' sums, in place, if elements() cannot. May throw.
  using Update = std::function<void(uint64_t version, const std::vector<uint32_t>& layers)>;

  // Creates this rank's part. `window` must outlive this object.
  Tree(NotifiedWindow& window, Settings settings);

  // Works and blocks until the stop slot is notified. Throws the error that ends the tree:
  // HSGD_ERR_PEER_LOST with the text of another rank that gave up, or for the death of a rank of
  // this node; HSGD_ERR_TIMEOUT if another node does not accept data; any error of `update`.
  void run(const Update& update);

  // Returns the update that makes weights without a call of `update`, once configured.
  ElementUpdate& elements() { return elements_; }

  // Returns the last parcels to other nodes, the oldest first; any thread may call it. Times are
  // those of now_ns().
  struct Sent {
    uint32_t layer;
    int target;
    int64_t begin_ns;
    int64_t end_ns;  // time at which its arrival was seen
  };
  std::vector<Sent> sent() const;

  // For tests: called before every notification.
  void before_notify(std::function<void()> call) { before_notify_ = std::move(call); }

 private:
  struct Watched {
    uint32_t layer;
    bool weights;
  };
  // A parcel to send; the lowest layer goes first.
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
  // The parcels to one target. The window is for networks that do not keep the order.
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
  std::vector<NotifiedWindow::Seen> seen_;  // in serving order
  std::vector<Watched> watched_;            // the same
  std::vector<uint32_t> index_of_slot_;
  std::vector<uint64_t> gathered_;  // the version sent up, by layer
  std::vector<uint64_t> arrived_;   // the version of the weights here, by layer
  std::vector<uint32_t> held_;      // with whole_step: layers with a sum that waits for the others
  ElementUpdate elements_;
  std::vector<int> targets_;  // of lanes_
  std::vector<Lane> lanes_;
  mutable std::mutex sent_mutex_;
  std::deque<Sent> sent_;
  std::function<void()> before_notify_;
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_TREE_GRADIENT_TREE_HPP_
