// The sender's end of a connection of NCCL, one of whose sockets has no room.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <utility>
#include <vector>

#include "bindings/nccl_net/send_channel.hpp"
#include "support/check.hpp"

namespace {

using hsgd::Fd;
using hsgd::nccl_net::kConnections;
using hsgd::nccl_net::Request;
using hsgd::nccl_net::SendChannel;

}  // namespace

TEST("an empty message is complete when its header is sent, whatever ends before it") {
  // However many messages the channel keeps in one piece of memory, the empty one is its last once.
  for (int before = 0; before < 16; ++before) {
    std::vector<Fd> ours;
    std::vector<Fd> theirs;
    for (uint32_t i = 0; i < kConnections; ++i) {
      int ends[2];
      CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
      ours.emplace_back(ends[0]);
      theirs.emplace_back(ends[1]);
    }
    const Fd first_stripe = Fd::duplicate(ours[1].get());
    SendChannel channel(std::move(ours), "a peer", 5);
    for (int i = 0; i < before; ++i) CHECK_EQ(channel.send("x", 1, i)->open, size_t{0});
    std::array<char, 4096> junk{};
    while (::write(first_stripe.get(), junk.data(), 1) > 0) {
    }
    Request* empty = channel.send("", 0, 100);
    for (int i = 0; i < 16; ++i) CHECK_EQ(channel.send("y", 1, 101 + i)->open, size_t{0});
    CHECK_EQ(empty->open, size_t{1});
    while (::read(theirs[1].get(), junk.data(), junk.size()) > 0) {
    }
    channel.progress();
    CHECK_EQ(empty->open, size_t{0});
  }
}
