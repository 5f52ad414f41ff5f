// Messages between leaders over TCP, all of them in this process: contents, order, who is let in,
// what is believed, and how the end of one shows.
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "network/tcp_messages/message_frames.hpp"
#include "network/tcp_messages/tcp_leader.hpp"
#include "network/tcp_messages/transport.hpp"
#include "support/check.hpp"
#include "support/ranks.hpp"

namespace {

using hsgd::Channel;
using hsgd::ConnectionPlan;
using hsgd::Deadline;
using hsgd::Fd;
using hsgd::kLeaderMagic;
using hsgd::MessageFrame;
using hsgd::Parting;
using hsgd::TcpLeader;
using hsgd::TcpLeaders;
using hsgd::Transport;
using Bytes = std::vector<uint8_t>;

constexpr double kLimitS = 60.0;
constexpr std::array kChannels = {Channel::kHeader, Channel::kScatter, Channel::kGather,
                                  Channel::kBroadcast, Channel::kExchange};

Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes made(bytes);
  std::mt19937_64 random(seed);
  for (uint8_t& byte : made) byte = static_cast<uint8_t>(random());
  return made;
}

void await(Transport& transport, Transport::Ticket ticket) {
  const Deadline deadline(kLimitS);
  while (!transport.done(ticket)) {
    if (deadline.passed()) throw hsgd::Error(HSGD_ERR_TIMEOUT, -1, "a message did not end");
    std::this_thread::yield();
  }
}

Parting await_parting(Transport& transport) {
  const Deadline deadline(kLimitS);
  Parting parting;
  while (!transport.heard(&parting)) {
    if (deadline.passed()) throw hsgd::Error(HSGD_ERR_TIMEOUT, -1, "no parting came");
    std::this_thread::yield();
  }
  return parting;
}

// Leaders of so many nodes, whose world ranks are 10 times their nodes.
struct Leaders {
  explicit Leaders(int nodes, const std::function<void(TcpLeaders&)>& change = {}) {
    for (int node = 0; node < nodes; ++node) {
      all.push_back(std::make_unique<TcpLeader>("lo", nodes));
      told.places.push_back(all.back()->place());
      told.ranks.push_back(10 * node);
    }
    if (change) change(told);
  }
  TcpLeaders of(int node) const {
    TcpLeaders leaders = told;
    leaders.node = node;
    return leaders;
  }
  std::unique_ptr<Transport> open(int node) const {
    TcpLeader& leader = *all[static_cast<size_t>(node)];
    leader.connect(of(node), Deadline(kLimitS));
    return leader.make_transport(kLimitS);
  }

  std::vector<std::unique_ptr<TcpLeader>> all;
  TcpLeaders told;
};

// body(node, its transport), in a thread for each node.
void on_nodes(int nodes, const std::function<void(int, Transport&)>& body,
              const std::function<void(TcpLeaders&)>& change = {}) {
  const Leaders leaders(nodes, change);
  ranks::run(nodes, [&](int node) {
    const std::unique_ptr<Transport> transport = leaders.open(node);
    body(node, *transport);
    transport->part({1, 10 * node, Parting::kClosed, "closed"});
    transport->quiesce(Deadline(kLimitS));
  });
}

// A pair of nodes, of which the other one is played by hand: the far ends of its connections.
struct ByHand {
  ByHand() {
    const ConnectionPlan plan(2);
    std::vector<std::vector<Fd>> near(2);
    for (int index = 0; index < plan.count(); ++index) {
      int ends[2];
      CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      near[1].emplace_back(ends[0]);
      far.emplace_back(ends[1]);
    }
    transport = hsgd::make_tcp_transport(std::move(near), {0, 10}, 0, 0);
  }
  void put(int connection, const void* data, size_t bytes) const {
    CHECK_EQ(::send(far[static_cast<size_t>(connection)].get(), data, bytes, MSG_NOSIGNAL),
             static_cast<ssize_t>(bytes));
  }
  void put(int connection, const MessageFrame& frame, const Bytes& data = {}) const {
    put(connection, &frame, sizeof frame);
    if (!data.empty()) put(connection, data.data(), data.size());
  }
  size_t waiting(int connection) const {
    int bytes = 0;
    ::ioctl(far[static_cast<size_t>(connection)].get(), FIONREAD, &bytes);
    return static_cast<size_t>(bytes);
  }

  std::vector<Fd> far;
  std::unique_ptr<Transport> transport;
};

// Connections of channels in a pair of nodes.
constexpr int kHeaders = 1;
constexpr int kScatter = 2;
constexpr int kScatterToo = 3;

}  // namespace

TEST("messages of all sizes come as they were sent, both ways at once") {
  const std::vector<size_t> sizes = {0, 1, 31, 4093, 262144, 262145, 1048573, (16 << 20) + 7};
  on_nodes(2, [&](int node, Transport& transport) {
    for (const size_t bytes : sizes) {
      const Bytes out = pattern(bytes, static_cast<uint64_t>(node));
      Bytes in(bytes + 1);
      const auto received = transport.receive(1 - node, Channel::kScatter, in.data(), in.size());
      const auto sent = transport.send(1 - node, Channel::kScatter, out.data(), out.size());
      await(transport, received);
      await(transport, sent);
      in.pop_back();
      CHECK(in == pattern(bytes, static_cast<uint64_t>(1 - node)));
    }
  });
}

TEST("many messages on all channels between four nodes keep the order of each channel") {
  constexpr int kNodes = 4;
  constexpr size_t kMessages = 60;
  on_nodes(kNodes, [&](int node, Transport& transport) {
    const auto bytes_of = [](int from, int to, Channel channel, size_t number) {
      std::mt19937_64 random(static_cast<uint64_t>((from * kNodes + to) * 8) +
                             static_cast<uint64_t>(channel) + 1000 * number);
      return pattern(random() % 8 == 0 ? random() % 400'000 : random() % 900, random());
    };
    std::vector<Bytes> out;
    std::vector<Bytes> in;
    std::vector<Transport::Ticket> tickets;
    for (size_t number = 0; number < kMessages; ++number) {
      for (int other = 0; other < kNodes; ++other) {
        for (const Channel channel : kChannels) {
          if (other == node) continue;
          out.push_back(bytes_of(node, other, channel, number));
          tickets.push_back(transport.send(other, channel, out.back().data(), out.back().size()));
        }
      }
    }
    // Late, and channel by channel: nothing that was not asked for keeps others waiting.
    for (int other = 0; other < kNodes; ++other) {
      for (auto channel = kChannels.rbegin(); other != node && channel != kChannels.rend();
           ++channel) {
        in.clear();
        in.resize(kMessages, Bytes(400'000));
        std::vector<Transport::Ticket> received;
        for (Bytes& each : in) {
          received.push_back(transport.receive(other, *channel, each.data(), each.size()));
        }
        for (const auto ticket : received) await(transport, ticket);
        for (size_t number = 0; number < kMessages; ++number) {
          const Bytes expected = bytes_of(other, node, *channel, number);
          CHECK(std::equal(expected.begin(), expected.end(), in[number].begin()));
        }
      }
    }
    for (const auto ticket : tickets) await(transport, ticket);
  });
}

TEST("a large message goes over several connections, a small one over one") {
  ByHand pair;
  const Bytes data = pattern(8 << 20, 1);
  pair.transport->send(1, Channel::kScatter, data.data(), 1000);
  CHECK_EQ(pair.waiting(kScatter) + pair.waiting(kScatterToo), sizeof(MessageFrame) + 1000);
  pair.transport->send(1, Channel::kScatter, data.data(), data.size());
  CHECK(pair.waiting(kScatter) > 2000 && pair.waiting(kScatterToo) > 2000);
  CHECK_EQ(pair.waiting(kHeaders), 0U);
}

TEST("pieces of a message come over several connections in any order") {
  ByHand pair;
  const Bytes data = pattern(3000, 7);
  Bytes in(3000);
  const auto ticket = pair.transport->receive(1, Channel::kScatter, in.data(), in.size());
  const auto part = [&](size_t from, size_t to) {
    return Bytes(data.begin() + static_cast<long>(from), data.begin() + static_cast<long>(to));
  };
  pair.put(kScatterToo, {0, 3000, 2000, 1000, kLeaderMagic}, part(2000, 3000));
  CHECK(!pair.transport->done(ticket));
  pair.put(kScatter, {0, 3000, 0, 1500, kLeaderMagic}, part(0, 1500));
  CHECK(!pair.transport->done(ticket));
  pair.put(kScatter, {0, 3000, 1500, 500, kLeaderMagic}, part(1500, 2000));
  await(*pair.transport, ticket);
  CHECK(in == data);
}

TEST("what nobody asked for waits in the kernel, and the next channel's is taken") {
  ByHand pair;
  Bytes in(4);
  Bytes later(4);
  pair.put(kScatter, {0, 4, 0, 4, kLeaderMagic}, {1, 2, 3, 4});
  pair.put(kHeaders, {0, 4, 0, 4, kLeaderMagic}, {5, 6, 7, 8});
  const auto ticket = pair.transport->receive(1, Channel::kHeader, in.data(), in.size());
  await(*pair.transport, ticket);
  CHECK(in == (Bytes{5, 6, 7, 8}));
  const auto scatter = pair.transport->receive(1, Channel::kScatter, later.data(), later.size());
  await(*pair.transport, scatter);
  CHECK(later == (Bytes{1, 2, 3, 4}));
}

TEST("lengths that do not fit are not believed, and who sent them is named") {
  const std::vector<MessageFrame> wrong = {
      {0, 4, 0, 4, kLeaderMagic + 1},                // of another version
      {0, 17, 0, 4, kLeaderMagic},                   // longer than what is expected
      {0, 4, 0, 5, kLeaderMagic},                    // a piece longer than the message
      {0, 16, UINT64_MAX, 4, kLeaderMagic},          // behind its end
      {0, UINT64_MAX, 8, UINT32_MAX, kLeaderMagic},  // longer than any piece
  };
  for (const MessageFrame& frame : wrong) {
    ByHand pair;
    Bytes in(16);
    const auto ticket = pair.transport->receive(1, Channel::kScatter, in.data(), in.size());
    pair.put(kScatter, frame, Bytes(64, 9));
    const Parting parting = await_parting(*pair.transport);
    CHECK_EQ(parting.rank, 10);
    CHECK(std::strstr(parting.line,
                      "rank 10 on another node died or was cut off (it sent an invalid") !=
          nullptr);
    CHECK(!pair.transport->done(ticket));
    CHECK(in == Bytes(16));
  }
}

TEST("a piece that comes twice is refused") {
  ByHand pair;
  Bytes in(8);
  pair.transport->receive(1, Channel::kScatter, in.data(), in.size());
  for (int i = 0; i < 3; ++i) pair.put(kScatter, {0, 8, 0, 4, kLeaderMagic}, Bytes(4, 1));
  CHECK_EQ(await_parting(*pair.transport).rank, 10);
}

TEST("a leader that ends without a word is named, and the others go on") {
  const Leaders leaders(3);
  ranks::run(3, [&](int node) {
    std::unique_ptr<Transport> transport = leaders.open(node);
    if (node == 2) return;  // the kernel closes its connections
    const Parting parting = await_parting(*transport);
    CHECK_EQ(parting.rank, 20);
    CHECK_EQ(parting.sequence, 0U);
    CHECK(std::strstr(parting.line, "rank 20 on another node died or was cut off") != nullptr);
    Parting second;
    CHECK(!transport->heard(&second));
    const int other = 1 - node;
    int in = 0;
    const auto received = transport->receive(other, Channel::kGather, &in, sizeof in);
    await(*transport, transport->send(other, Channel::kGather, &node, sizeof node));
    await(*transport, received);
    CHECK_EQ(in, other);
    transport->part({});
    transport->quiesce(Deadline(kLimitS));
  });
}

TEST("a parting overtakes messages, and is heard once") {
  on_nodes(3, [](int node, Transport& transport) {
    const Bytes data = pattern(500'000, 3);
    std::vector<Transport::Ticket> sent;
    if (node == 0) {
      for (const int other : {1, 2}) {
        sent.push_back(transport.send(other, Channel::kScatter, data.data(), data.size()));
      }
      transport.part({7, 4, Parting::kGaveUp, "rank 4 is tired"});
      transport.part({8, 5, Parting::kGaveUp, "only the first counts"});
    } else {
      const Parting parting = await_parting(transport);
      CHECK_EQ(parting.sequence, 7U);
      CHECK_EQ(parting.rank, 4);
      CHECK_EQ(std::string(parting.line), "rank 4 is tired");
      Bytes in(data.size());
      await(transport, transport.receive(0, Channel::kScatter, in.data(), in.size()));
      CHECK(in == data);
    }
    for (const auto ticket : sent) await(transport, ticket);
  });
}

TEST("what was sent before the end arrives after it, though the other did not read") {
  const Leaders leaders(2);
  const Bytes data = pattern(50'000, 5);  // fits in the kernel
  std::atomic<bool> gone{false};
  ranks::run(2, [&](int node) {
    std::unique_ptr<Transport> transport = leaders.open(node);
    if (node == 0) {
      // Unread bytes here: the end of this process would else drop what it has sent.
      await(*transport, transport->send(1, Channel::kScatter, data.data(), data.size()));
      transport->part({3, 0, Parting::kClosed, "rank 0 closed its communicator"});
      CHECK(transport->quiesce(Deadline(kLimitS)));
      transport.reset();
      gone.store(true);
      return;
    }
    const auto sent = transport->send(0, Channel::kScatter, data.data(), data.size());
    while (!gone.load()) std::this_thread::yield();
    Bytes in(data.size());
    await(*transport, transport->receive(0, Channel::kScatter, in.data(), in.size()));
    CHECK(in == data);
    CHECK_EQ(std::string(await_parting(*transport).line), "rank 0 closed its communicator");
    static_cast<void>(sent);
    transport->quiesce(Deadline(kLimitS));
  });
}

TEST("receives that are given up are not written, and quiesce() ends at its deadline") {
  ByHand pair;
  Bytes in(8, 1);
  const Bytes data = pattern(32 << 20, 5);
  pair.transport->receive(1, Channel::kHeader, in.data(), in.size());
  pair.transport->send(1, Channel::kScatter, data.data(), data.size());
  pair.put(kHeaders, {0, 8, 0, 8, kLeaderMagic}, Bytes(8, 2));
  CHECK(!pair.transport->quiesce(Deadline(0.02)));
  CHECK(in == Bytes(8, 1));
}

TEST("the node that takes no message is the one that is waited for, where no message is missing") {
  ByHand pair;
  const Bytes data = pattern(32 << 20, 5);
  CHECK_EQ(pair.transport->awaited_node(), -1);
  const auto sent = pair.transport->send(1, Channel::kScatter, data.data(), data.size());
  CHECK(!pair.transport->done(sent));
  CHECK_EQ(pair.transport->awaited_node(), 1);
  pair.transport->quiesce(Deadline(0));
}

TEST("nobody is let in without the secret, and strangers keep no leader from another") {
  const Leaders leaders(2);
  const hsgd::SocketPlace& place = leaders.told.places[0];
  std::vector<Fd> strangers;
  for (int kind = 0; kind < 6; ++kind) {
    const hsgd::SocketAddress address = hsgd::socket_address(place.addresses.front(), place.port);
    strangers.emplace_back(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK_EQ(::connect(strangers.back().get(), address.get(), address.bytes), 0);
    hsgd::LeaderHello hello{place.token, kLeaderMagic, 1, 0, ConnectionPlan(2).count()};
    if (kind == 0) hello.token[15] ^= 1;
    if (kind == 1) hello.magic ^= 1;
    if (kind == 2) hello.node = 2;
    if (kind == 3) hello.connection = -1;
    if (kind == 4) hello.connections = 1;
    const size_t bytes = kind == 5 ? 7 : sizeof hello;  // the last one says no more
    CHECK_EQ(::send(strangers.back().get(), &hello, bytes, 0), static_cast<ssize_t>(bytes));
  }
  ranks::run(2, [&](int node) {
    std::unique_ptr<Transport> transport = leaders.open(node);
    int in = -1;
    const auto received = transport->receive(1 - node, Channel::kHeader, &in, sizeof in);
    transport->send(1 - node, Channel::kHeader, &node, sizeof node);
    await(*transport, received);
    CHECK_EQ(in, 1 - node);
    transport->part({});
    transport->quiesce(Deadline(kLimitS));
  });
  for (const Fd& stranger : strangers) {
    uint32_t answer = 0;
    CHECK(::recv(stranger.get(), &answer, sizeof answer, 0) <= 0);  // shown out
  }
}

TEST("a leader that does not come is named when the deadline passes") {
  const Leaders leaders(3);
  CHECK_THROWS(leaders.all[2]->connect(leaders.of(2), Deadline(0.05)),
               "rank 0 did not accept a connection at TCP port ");
  CHECK_THROWS(leaders.all[0]->connect(leaders.of(0), Deadline(0.05)),
               "rank 10 did not connect to rank 0 at its address within 0.05 s");
}

TEST("a leader that is gone is named at once, with its address") {
  Leaders leaders(2);
  leaders.all[0].reset();
  CHECK_THROWS(leaders.all[1]->connect(leaders.of(1), Deadline(kLimitS)),
               " of 127.0.0.1 (Connection refused)");
}

TEST("each address of a node is tried, and all are named if all refuse") {
  const auto with_refusing = [](TcpLeaders leaders) {
    hsgd::IpAddresses& all = leaders.places[0].addresses;
    std::copy_backward(all.begin(), all.end() - 1, all.end());
    all[0] = all[1];
    all[0].host[3] = 9;  // 127.0.0.9, where nobody listens
    return leaders;
  };
  Leaders leaders(2);
  ranks::run(2, [&](int node) {
    leaders.all[static_cast<size_t>(node)]->connect(with_refusing(leaders.of(node)),
                                                    Deadline(kLimitS));
  });
  Leaders gone(2);
  gone.all[0].reset();
  CHECK_THROWS(gone.all[1]->connect(with_refusing(gone.of(1)), Deadline(kLimitS)),
               " of 127.0.0.9 (Connection refused), 127.0.0.1 (Connection refused)");
}

TEST("leaders meet over IPv6") {
  const auto six_only = [](TcpLeaders& leaders) {
    for (auto& place : leaders.places) {
      const auto end = std::remove_if(place.addresses.begin(), place.addresses.end(),
                                      [](const auto& each) { return each.version != 6; });
      std::fill(end, place.addresses.end(), hsgd::IpAddress{});
    }
  };
  const hsgd::IpAddresses loopback = hsgd::find_addresses("lo");
  const bool has_six = std::any_of(loopback.begin(), loopback.end(),
                                   [](const auto& each) { return each.version == 6; });
  if (!has_six) return;  // a machine without IPv6
  on_nodes(
      2,
      [](int node, Transport& transport) {
        int in = -1;
        const auto received = transport.receive(1 - node, Channel::kHeader, &in, sizeof in);
        await(transport, transport.send(1 - node, Channel::kHeader, &node, sizeof node));
        await(transport, received);
        CHECK_EQ(in, 1 - node);
      },
      six_only);
}

TEST("many nodes have one connection for each channel and pair, few have several") {
  CHECK_EQ(ConnectionPlan(16).count(), 10);
  CHECK_EQ(ConnectionPlan(17).count(), 6);
  for (const int nodes : {2, 17}) {
    const ConnectionPlan plan(nodes);
    std::vector<int> of_channel(ConnectionPlan::kChannels, 0);
    for (int index = 1; index < plan.count(); ++index) {
      ++of_channel[static_cast<size_t>(plan.channel(index))];
    }
    CHECK_EQ(of_channel.front(), 1);
    CHECK(std::all_of(of_channel.begin() + 1, of_channel.end(),
                      [&](int count) { return count == (nodes == 2 ? 2 : 1); }));
  }
}
