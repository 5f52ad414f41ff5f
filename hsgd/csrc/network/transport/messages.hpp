// Messages between leaders, the window of pipeline steps whose messages are in flight, and what of
// a step may travel behind the headers.
//
// Owns the order: a step is finished when its messages and those of all earlier steps have arrived
// and left. Never knows what the messages hold.
#ifndef HSGD_NETWORK_TRANSPORT_MESSAGES_HPP_
#define HSGD_NETWORK_TRANSPORT_MESSAGES_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "network/transport/transport.hpp"

namespace hsgd {

struct WireCounters {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// A set of messages that are waited for together.
class Messages {
 public:
  explicit Messages(Transport& transport) : transport_(transport) {}
  void send(int node, Channel channel, const void* data, size_t bytes, WireCounters& counters);
  // There is no message of 0 bytes.
  void receive(int node, Channel channel, void* data, size_t bytes, WireCounters& counters);
  bool all_done();
  bool progressed();  // since the last call

 private:
  Transport& transport_;
  std::vector<Transport::Ticket> pending_;
  bool progressed_ = false;
};

// A payload of a node, or of a group of nodes whose payloads have been merged.
struct Payload {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// How the payloads of consecutive groups of nodes become one, written to `out`, which is apart from
// all of them. `is_last`: of all nodes. Returns its bytes.
using MergeFn =
    std::function<size_t(const std::vector<Payload>& parts, std::byte* out, bool is_last)>;

// The first step of a pipeline, of which each node is sent what it has to do with. Nothing is
// merged from nodes that called something else, nor from others after one is known.
class RoundPayload {
 public:
  // Before the rounds: from the node that takes no part to its partner.
  static constexpr int kFold = -1;

  virtual ~RoundPayload() = default;
  // Writes what goes to `core` in a round, and returns its bytes.
  virtual size_t write(int round, int core, std::byte* out) = 0;
  // Takes what came: in a round by index in the group, with nothing at this core's own; before the
  // rounds nothing and what the partner sent, or no parts on a core that has none.
  virtual void merge(int round, const std::vector<Payload>& parts) = 0;
};

// Steps of a pipeline, of which several are in flight and go through the same phases.
class StepWindow {
 public:
  virtual ~StepWindow() = default;
  uint64_t begun() const { return begun_; }
  uint64_t finished() const { return finished_; }  // in the order in which they began
  bool progress();                                 // true when anything moved on
  // Has the next step travel with the headers as far as it can: its begin() only prepares it, and
  // once the headers have gone their rounds progress() does the rest. nullptr: steps here do not.
  virtual RoundPayload* with_headers() { return nullptr; }

 protected:
  static constexpr int kFinished = INT32_MAX;
  explicit StepWindow(size_t slots) : phases_(slots) {}
  void restart() { begun_ = finished_ = 0; }
  // The slot of the next step, which is in phase 0.
  size_t begin_step();
  size_t slots() const { return phases_.size(); }
  // Moves the step in `slot` on; true when anything did. `is_first`: all earlier steps are in later
  // phases. Messages of a channel are matched in order, so that who posts some waits for that.
  virtual bool advance(size_t slot, int& phase, bool is_first) = 0;

 private:
  std::vector<int> phases_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

// Steps in which one node's data goes to all.
class BroadcastSteps : public StepWindow {
 public:
  virtual void start(int root_node) = 0;
  virtual bool is_root() const = 0;
  // The next step: on the root's node its data, elsewhere where it goes.
  virtual void begin(std::byte* data, size_t bytes) = 0;

 protected:
  using StepWindow::StepWindow;
};

// Steps of one phase: messages that are sent and received.
class StepMessages final : public StepWindow {
 public:
  StepMessages(Transport& transport, size_t slots, WireCounters& counters);
  void start() { restart(); }
  void begin() { current_ = begin_step(); }  // without messages yet: send() and receive() add them
  void send(int node, Channel channel, const void* data, size_t bytes);
  // The sender decides how much it sends, unless `capacity_bytes` is 0: then there is no message.
  void receive(int node, Channel channel, void* data, size_t capacity_bytes);
  void count_received(size_t bytes) { counters_.bytes_received += bytes; }

 private:
  bool advance(size_t slot, int& phase, bool is_first) override;

  WireCounters& counters_;
  std::vector<Messages> steps_;
  size_t current_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TRANSPORT_MESSAGES_HPP_
