// Messages of one queue over several connections, one of which has no room.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/os/shared_memory.hpp"
#include "network/tcp_messages/message_sender.hpp"
#include "support/check.hpp"

namespace {

using hsgd::Fd;
using hsgd::MessageQueue;
using hsgd::MessageSender;
using Tickets = std::vector<hsgd::Transport::Ticket>;

struct Connection {
  Connection() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    ours = Fd(ends[0]);
    theirs = Fd(ends[1]);
  }
  void fill() const {
    while (::write(ours.get(), junk.data(), 1) > 0) {
    }
  }
  void drain() const {
    std::array<char, 4096> taken;
    while (::read(theirs.get(), taken.data(), taken.size()) > 0) {
    }
  }
  std::array<char, 1> junk{};
  Fd ours;
  Fd theirs;
};

}  // namespace

TEST("an empty message stays in the queue until its frame is sent, whatever ends before it") {
  // However many messages the queue keeps in one piece of memory, the empty one is its last once.
  for (hsgd::Transport::Ticket before = 0; before < 16; ++before) {
    const Connection first;
    const Connection second;
    MessageQueue queue;
    MessageSender on_first;
    MessageSender on_second;
    Tickets done;
    for (hsgd::Transport::Ticket ticket = 0; ticket < before; ++ticket) {
      queue.add(ticket, "x", 1);
      on_first.send(first.ours.get(), queue, &done);
    }
    first.fill();
    queue.add(100, "", 0);
    CHECK(on_first.send(first.ours.get(), queue, &done) == MessageSender::State::kNoRoom);
    for (hsgd::Transport::Ticket ticket = 101; ticket < 116; ++ticket) {
      queue.add(ticket, "y", 1);
      on_second.send(second.ours.get(), queue, &done);
    }
    CHECK(!queue.empty());
    first.drain();
    on_first.send(first.ours.get(), queue, &done);
    CHECK_EQ(std::count(done.begin(), done.end(), 100u), 1);
    CHECK_EQ(done.size(), size_t{before} + 16);
    CHECK(queue.empty());
  }
}
