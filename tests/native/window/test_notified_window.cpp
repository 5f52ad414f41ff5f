// Operations to other nodes, over a network that a test steers step by step.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "network/transport/ordered_rma.hpp"
#include "onesided/window/put_queue.hpp"
#include "support/check.hpp"

namespace {

using hsgd::Deadline;
using hsgd::Error;
using hsgd::Notification;
using hsgd::Outbox;
using hsgd::Piece;

// Requests are done when the test says so; what was asked for is written down.
struct Wire {
  std::vector<std::string> log;
  std::vector<bool> done;
  bool fails = false;
  std::function<void()> in_flush = [] {};
  std::function<void()> in_sync = [] {};
};

class FakeWrites final : public hsgd::UnorderedWrites {
 public:
  explicit FakeWrites(Wire& wire) : wire_(wire) {}
  void reserve(size_t) override {}
  Ticket put(int target, const void*, size_t bytes, size_t offset) override {
    return note("put " + std::to_string(bytes) + " at " + std::to_string(offset), target);
  }
  Ticket replace(int target, const uint64_t* version, size_t offset) override {
    return note("version " + std::to_string(*version) + " at " + std::to_string(offset), target);
  }
  bool done(Ticket ticket) override {
    if (wire_.fails) throw Error(HSGD_ERR_PEER_LOST, 1, "the wire broke");
    return wire_.done[ticket];
  }
  void flush(int target) override {
    wire_.log.push_back("flush to " + std::to_string(target));
    wire_.in_flush();
  }
  void sync() override { wire_.in_sync(); }
  bool close(const Deadline&) noexcept override {
    wire_.log.push_back("close");
    return true;
  }

 private:
  Ticket note(const std::string& what, int target) {
    wire_.log.push_back(what + " to " + std::to_string(target));
    wire_.done.push_back(false);
    return static_cast<Ticket>(wire_.done.size() - 1);
  }
  Wire& wire_;
};

uint64_t post_to(Outbox& outbox, int target, uint32_t slot, uint64_t version, size_t pieces = 1) {
  static const std::byte data[16] = {};
  const std::vector<Piece> list(pieces, Piece{data, sizeof data, 64});
  uint64_t ticket = 0;
  return outbox.post(list, Notification{target, slot, version, slot * 8}, &ticket) ? ticket : 0;
}

struct Box {
  explicit Box(uint32_t capacity = 8, double timeout_s = 60.0)
      : network(hsgd::make_ordered_rma(std::make_unique<FakeWrites>(wire)).release()),
        outbox(std::unique_ptr<hsgd::Rma>(network), capacity, timeout_s, false) {}
  uint64_t post(int target, uint32_t slot, uint64_t version, size_t pieces = 1) {
    return post_to(outbox, target, slot, version, pieces);
  }
  void finish(size_t request) {
    wire.done[request] = true;
    outbox.drive();
  }
  Wire wire;
  hsgd::Rma* network;  // the outbox's
  Outbox outbox;
};

using Lines = std::vector<std::string>;

TEST("the version goes when the data is there, and the ticket is done when the version is") {
  Box box;
  const uint64_t ticket = box.post(2, 3, 9, 2);
  CHECK(ticket == 1);
  box.outbox.drive();
  box.finish(1);  // the second piece arrives first
  CHECK(box.wire.log == Lines({"put 16 at 64 to 2", "put 16 at 64 to 2"}));
  box.finish(0);
  CHECK(!box.outbox.done(ticket));
  CHECK(box.wire.log.size() == 4);
  CHECK(box.wire.log[2] == "flush to 2");
  CHECK(box.wire.log[3] == "version 9 at 24 to 2");
  box.finish(2);
  CHECK(box.outbox.done(ticket) && box.outbox.empty());
  CHECK(box.wire.log.back() == "flush to 2");
}

TEST("versions of a slot keep their order, whatever data comes first") {
  Box box;
  box.post(1, 0, 1);
  box.post(1, 0, 2);
  box.post(1, 1, 1);
  box.finish(1);  // the data of the later version first
  box.finish(2);
  const Lines& log = box.wire.log;
  CHECK(std::count(log.begin(), log.end(), "version 2 at 0 to 1") == 0);
  CHECK(std::count(log.begin(), log.end(), "version 1 at 8 to 1") == 1);  // another slot goes on
  box.finish(0);
  CHECK(std::count(log.begin(), log.end(), "version 2 at 0 to 1") == 0);
  box.finish(4);  // version 1 is there
  CHECK(std::count(log.begin(), log.end(), "version 2 at 0 to 1") == 1);
}

TEST("a full box takes nothing and names its oldest operation") {
  Box box(2);
  CHECK(box.post(1, 0, 1) == 1 && box.post(3, 5, 4) == 2);
  const size_t lines = box.wire.log.size();
  CHECK(box.post(1, 2, 1) == 0 && box.wire.log.size() == lines);
  int target = 0;
  CHECK(box.outbox.oldest(&target) == "version 1 for slot 0 of rank 1" && target == 1);
  box.finish(0);
  box.finish(2);
  CHECK(box.post(1, 2, 1) == 3);
}

TEST("the oldest target can be asked for while the network holds up who drives it") {
  Box box;
  CHECK(box.outbox.oldest_target() == -1);
  int target = -1;
  box.wire.in_flush = [&] { target = box.outbox.oldest_target(); };  // a lock would not return
  box.post(2, 0, 1);
  box.post(3, 0, 1);
  box.finish(0);
  CHECK(target == 2);
  box.wire.in_flush = [] {};
  box.finish(2);  // its version
  CHECK(box.outbox.oldest_target() == 3);
  box.finish(1);
  box.finish(3);
  CHECK(box.outbox.empty() && box.outbox.oldest_target() == -1);
}

TEST("close() finishes what is under way first, within the deadline") {
  Box box;
  int looks = 0;
  box.wire.in_sync = [&] { box.wire.done.assign(box.wire.done.size(), ++looks > 2); };
  box.post(2, 0, 1);
  CHECK(box.outbox.close(Deadline(60.0)));
  CHECK(box.wire.log ==
        Lines({"put 16 at 64 to 2", "flush to 2", "version 1 at 0 to 2", "flush to 2", "close"}));
  Box other;
  other.post(2, 0, 1);
  CHECK(!other.outbox.close(Deadline(0.01)));
  delete other.network;  // given up: a network might still use this rank's memory
  CHECK(other.wire.log.back() != "close");
}

TEST("what is not delivered in time breaks the box and names the rank") {
  Box box(2, 1e-9);
  const uint64_t ticket = box.post(4, 1, 6);
  for (int call = 0; call < 2; ++call) {
    try {
      box.outbox.drive();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == HSGD_ERR_TIMEOUT && error.rank() == 4);
      CHECK(std::strstr(error.what(), "version 6 for slot 1 of rank 4") != nullptr);
    }
  }
  try {
    box.outbox.done(ticket);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == HSGD_ERR_TIMEOUT);
  }
}

TEST("an error of the wire comes back from every call") {
  Box box;
  box.post(1, 0, 1);
  box.wire.fails = true;
  for (int call = 0; call < 2; ++call) {
    try {
      box.outbox.drive();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == HSGD_ERR_PEER_LOST);
    }
    box.wire.fails = false;
  }
}

// One that goes on without calls, and of whose ranks one may be gone.
class Switchboard final : public hsgd::Rma {
 public:
  Switchboard() : Rma(true) {}
  Ticket post(const std::vector<Piece>&, const Notification&) override { return ++last_; }
  void drive() override {}
  bool done(Ticket ticket) const override { return ticket <= served; }
  std::optional<Error> failure(int rank) const override {
    if (rank == kAll || rank != gone) return std::nullopt;
    return Error(HSGD_ERR_PEER_LOST, rank, "rank " + std::to_string(rank) + " is gone");
  }
  bool close(const Deadline&) noexcept override { return true; }
  void serve(Ticket last) {
    served = last;
    count_news();
  }

  Ticket served = 0;
  int gone = -1;

 private:
  Ticket last_ = 0;
};

TEST("over a network that drives itself one rank's end fails what goes to it, and no more") {
  auto* network = new Switchboard;
  Outbox outbox(std::unique_ptr<hsgd::Rma>(network), 8, 60.0, false);
  const uint64_t to_lost = post_to(outbox, 1, 0, 1);
  const uint64_t to_other = post_to(outbox, 2, 0, 1);
  network->gone = 1;
  network->serve(1);  // as done as it will ever be
  outbox.drive();
  CHECK_THROWS(outbox.done(to_lost), "rank 1 is gone");
  CHECK(!outbox.done(to_other));
  CHECK_THROWS(post_to(outbox, 1, 1, 1), "rank 1 is gone");
  const uint64_t later = post_to(outbox, 2, 1, 1);
  CHECK(!outbox.empty());
  network->serve(3);
  outbox.drive();
  CHECK(outbox.done(to_other) && outbox.done(later));
  CHECK_THROWS(outbox.empty(), "rank 1 is gone");  // not all that was put was delivered
}

}  // namespace
