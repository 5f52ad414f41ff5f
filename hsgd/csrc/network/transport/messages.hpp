// Messages, StepWindow: messages between leaders, the pipeline steps whose messages are in flight,
// and payloads that travel behind the headers.
//
// A step is finished when its messages and those of all earlier steps have arrived and were sent.
// Never interprets the messages.
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
  // Posts a receive. There are no messages of 0 bytes.
  void receive(int node, Channel channel, void* data, size_t bytes, WireCounters& counters);
  bool all_done();
  bool progressed();  // since the last call

 private:
  Transport& transport_;
  std::vector<Transport::Ticket> pending_;
  bool progressed_ = false;
};

// The payload of a node, or the merged payload of a group of nodes.
struct Payload {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// Merges the payloads of consecutive groups of nodes into `out`, which overlaps none of them.
// `is_last`: the result is of all nodes. Returns its bytes.
using MergeFn =
    std::function<size_t(const std::vector<Payload>& parts, std::byte* out, bool is_last)>;

// The first step of a pipeline; each node is sent what it handles. Once a node is known to have
// called something else, nothing more is merged, from it or from others.
class RoundPayload {
 public:
  // Pseudo-round before the rounds: from the node that takes no part to its partner.
  static constexpr int kFold = -1;

  virtual ~RoundPayload() = default;
  // Writes the message to `core` in a round, and returns its bytes.
  virtual size_t write(int round, int core, std::byte* out) = 0;
  // Takes the received parts. In a round they are indexed by position in the group; this core's own
  // entry is empty. Before the rounds they are an empty entry and the partner's part, or nothing on
  // a core without partner.
  virtual void merge(int round, const std::vector<Payload>& parts) = 0;
};

// Steps of a pipeline; several are in flight and go through the same phases.
class StepWindow {
 public:
  virtual ~StepWindow() = default;
  uint64_t begun() const { return begun_; }
  uint64_t finished() const { return finished_; }  // in the order in which they began
  bool progress();                                 // returns true if anything advanced
  // Makes the next step travel with the headers as far as possible: its begin() only prepares it,
  // and once the headers have finished their rounds, progress() does the rest. nullptr: steps here
  // cannot.
  virtual RoundPayload* with_headers() { return nullptr; }

 protected:
  static constexpr int kFinished = INT32_MAX;
  explicit StepWindow(size_t slots) : phases_(slots) {}
  void restart() { begun_ = finished_ = 0; }
  // Returns the slot of the next step, which is in phase 0.
  size_t begin_step();
  size_t slots() const { return phases_.size(); }
  // Advances the step in `slot`; returns true if anything advanced. `is_first`: all earlier steps
  // are in later phases. Messages of a channel are matched in order, so a step waits for `is_first`
  // before it posts messages.
  virtual bool advance(size_t slot, int& phase, bool is_first) = 0;

 private:
  std::vector<int> phases_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

// Steps in which the data of one node goes to all nodes.
class BroadcastSteps : public StepWindow {
 public:
  virtual void start(int root_node) = 0;
  virtual bool is_root() const = 0;
  // Begins the next step: `data` is read on the root's node, written on others.
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
  // Posts a receive. The sender chooses the length. If `capacity_bytes` is 0, there is no message.
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
