// Messages between leaders, and the window of pipeline steps whose messages are in flight.
//
// Owns the order: a step is finished when its messages and those of all earlier steps have arrived
// and left. Never knows what the messages hold.
#ifndef HSGD_INTERNODE_MESSAGES_HPP_
#define HSGD_INTERNODE_MESSAGES_HPP_

#include <cstdint>
#include <vector>

#include "internode/round_payload.hpp"
#include "internode/transport.hpp"

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

#endif  // HSGD_INTERNODE_MESSAGES_HPP_
