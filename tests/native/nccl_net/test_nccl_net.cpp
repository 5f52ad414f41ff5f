// The network plugin of NCCL as its proxy drives it: what arrives, for all versions of the tables.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bindings/nccl_net/network_devices.hpp"
#include "core/os/shared_memory.hpp"
#include "support/check.hpp"
#include "support/nccl_proxy.hpp"

namespace {

using hsgd::nccl_net::kHostMemory;
using hsgd::nccl_net::kMostAhead;
using hsgd::nccl_net::kMostEagerBytes;
using hsgd::nccl_net::kMostGrouped;
using hsgd::nccl_net::kMostOpen;
using hsgd::nccl_net::kMostPieceBytes;
using hsgd::nccl_net::kSuccess;
using proxy::Net;
using proxy::net_of;
using proxy::Pair;
using Bytes = std::vector<uint8_t>;

Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes made(bytes);
  std::mt19937_64 random(seed);
  for (uint8_t& byte : made) byte = static_cast<uint8_t>(random());
  return made;
}

template <class Properties>
Properties properties_of(hsgd::nccl_net::GetProperties<Properties> get) {
  Properties properties{};
  CHECK_EQ(get(0, &properties), kSuccess);
  return properties;
}

}  // namespace

TEST("a message arrives through the table of each version") {
  for (int version = 6; version <= 12; ++version) {
    Pair pair(net_of(version));
    Bytes sent = pattern(100'003, static_cast<uint64_t>(version));
    Bytes got(sent.size() + 1, 0xab);
    void* received = pair.receive(got.data(), got.size(), version);
    CHECK_EQ(pair.finish(pair.send(sent.data(), sent.size(), version), received),
             static_cast<int>(sent.size()));
    CHECK(std::equal(sent.begin(), sent.end(), got.begin()));
    CHECK_EQ(int{got.back()}, 0xab);
  }
}

TEST("messages of every size around a piece and a turn arrive whole") {
  Pair pair(net_of(12));
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{31}, kMostEagerBytes, kMostEagerBytes + 1, kMostPieceBytes - 1,
        kMostPieceBytes, kMostPieceBytes + 1, 5 * kMostPieceBytes + 7, size_t{9} << 20}) {
    Bytes sent = pattern(bytes, bytes);
    Bytes got(bytes);
    void* received = pair.receive(got.data(), bytes, 0);
    CHECK_EQ(pair.finish(pair.send(sent.data(), bytes, 0), received), static_cast<int>(bytes));
    CHECK(sent == got);
  }
}

TEST("a group takes each message by its tag, in any order") {
  Pair pair(net_of(12));
  constexpr int kCount = static_cast<int>(kMostGrouped);
  std::vector<Bytes> got(kMostGrouped, Bytes(64));
  std::vector<void*> data;
  std::vector<int> tags;
  for (int i = 0; i < kCount; ++i) {
    data.push_back(got[static_cast<size_t>(i)].data());
    tags.push_back(10 * i);
  }
  std::vector<size_t> capacity(kMostGrouped, 64);
  void* received = nullptr;
  CHECK_EQ(
      pair.net.irecv(pair.receiver, kCount, data.data(), capacity.data(), tags.data(), &received),
      kSuccess);
  for (int i = kCount; i-- > 0;) {
    Bytes sent(static_cast<size_t>(i) + 1, static_cast<uint8_t>(i));
    pair.finish(pair.send(sent.data(), sent.size(), 10 * i), nullptr);
  }
  std::vector<int> sizes(kMostGrouped);
  const hsgd::Deadline deadline(proxy::kLimitS);
  while (!pair.is_done(received, sizes.data()) && !deadline.passed()) {
  }
  for (int i = 0; i < kCount; ++i) {
    CHECK_EQ(sizes[static_cast<size_t>(i)], i + 1);
    CHECK_EQ(int{got[static_cast<size_t>(i)][static_cast<size_t>(i)]}, i);
  }
}

TEST("a message without a receive is in the way of no other") {
  Pair pair(net_of(12));
  Bytes large = pattern(4 << 20, 1);
  Bytes small = pattern(10, 2);
  Bytes got_small(small.size());
  Bytes got_large(large.size());
  void* waits = pair.send(large.data(), large.size(), 1);
  pair.finish(pair.send(small.data(), small.size(), 2),
              pair.receive(got_small.data(), got_small.size(), 2));
  CHECK(small == got_small);
  CHECK(!pair.is_done(waits));
  pair.finish(waits, pair.receive(got_large.data(), got_large.size(), 1));
  CHECK(large == got_large);
}

TEST("short messages go before their receives are posted, but not many of one tag") {
  Pair pair(net_of(12));
  std::vector<uint8_t> sent(3 * kMostAhead);
  std::vector<void*> requests;
  for (size_t i = 0; i < sent.size(); ++i) {
    sent[i] = static_cast<uint8_t>(i);
    requests.push_back(pair.send(&sent[i], 1, 5));
  }
  for (size_t i = 0; i < sent.size(); ++i) CHECK_EQ(pair.is_done(requests[i]), i < kMostAhead);
  pair.finish(pair.send(&sent[9], 1, 6), nullptr);
  for (size_t i = 0; i < sent.size(); ++i) {
    uint8_t got = 255;
    pair.finish(i < kMostAhead ? nullptr : requests[i], pair.receive(&got, 1, 5));
    CHECK_EQ(int{got}, static_cast<int>(i));
  }
  uint8_t got = 255;
  pair.finish(nullptr, pair.receive(&got, 1, 6));
  CHECK_EQ(int{got}, 9);
}

TEST("a call returns no request when too many are open, and one later") {
  Pair pair(net_of(12));
  Bytes data(kMostEagerBytes + 1);
  Bytes got(data.size());
  const auto send = [&] { return pair.send(data.data(), data.size(), 0); };
  const auto receive = [&] { return pair.receive(got.data(), got.size(), 0); };
  std::vector<void*> sent;
  for (size_t i = 0; i < kMostOpen; ++i) sent.push_back(send());
  CHECK(std::count(sent.begin(), sent.end(), nullptr) == 0);
  CHECK(send() == nullptr);
  for (void* request : sent) pair.finish(request, receive());
  void* again = send();
  CHECK(again != nullptr);
  pair.finish(again, receive());
}

TEST("a message of more than 4 GB arrives whole") {
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
  if (hsgd::available_memory_bytes() < size_t{12} << 30) {
    std::puts("skipped: it takes 8 GB of memory");
    return;
  }
  Pair pair(net_of(12));
  const size_t bytes = (size_t{4} << 30) + 12'345;
  std::vector<uint64_t> sent(bytes / 8 + 1);
  std::vector<uint64_t> got(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = i * 0x9e3779b97f4a7c15;
  void* received = pair.receive(got.data(), bytes, 0);
  CHECK_EQ(pair.finish(pair.send(sent.data(), bytes, 0), received), INT32_MAX);
  CHECK(std::memcmp(sent.data(), got.data(), bytes) == 0);
#endif
}

TEST("properties tell of host memory and of the interface, in each layout") {
  const Net net = net_of(6);
  void* context = nullptr;
  CHECK_EQ(net.init(&context), kSuccess);
  const auto v6 =
      properties_of<hsgd::nccl_net::PropertiesV6>(proxy::ncclNetPlugin_v6.get_properties);
  const auto v8 =
      properties_of<hsgd::nccl_net::PropertiesV8>(proxy::ncclNetPlugin_v8.calls.get_properties);
  const auto v12 =
      properties_of<hsgd::nccl_net::PropertiesV12>(proxy::ncclNetPlugin_v12.calls.get_properties);
  CHECK_EQ(std::string(v6.name), std::string(v12.first.name));
  CHECK_EQ(v6.ptr_support, kHostMemory);
  CHECK_EQ(v8.ptr_support, kHostMemory);
  CHECK_EQ(v12.first.ptr_support, kHostMemory);
  CHECK(v6.speed_mbps > 0);
  CHECK_EQ(v8.speed_mbps, v6.speed_mbps);
  CHECK_EQ(v12.first.speed_mbps, v6.speed_mbps);
  CHECK_EQ(v12.first.virtual_device.count, 1);
  CHECK_EQ(v12.rail_id, -1);
  hsgd::nccl_net::PropertiesV6 none{};
  CHECK(proxy::ncclNetPlugin_v6.get_properties(99, &none) != kSuccess);
}

TEST("host memory is registered, memory of a device is refused, and a flush is nothing") {
  Pair pair(net_of(12));
  uint8_t byte = 0;
  void* mhandle = nullptr;
  CHECK_EQ(pair.net.reg_mr(pair.sender, &byte, 1, kHostMemory, &mhandle), kSuccess);
  CHECK(pair.net.reg_mr(pair.sender, &byte, 1, 2, &mhandle) != kSuccess);
  void* request = &byte;
  CHECK_EQ(pair.net.iflush(pair.receiver, 1, nullptr, nullptr, nullptr, &request), kSuccess);
  CHECK(request == nullptr);
  proxy::take_warnings();
}

TEST("NCCL_SOCKET_IFNAME chooses interfaces as NCCL's own sockets do") {
  const std::vector<std::string> all = {"lo", "eth0", "eth1", "docker0", "ib0"};
  const auto chosen = [&](const char* wanted) {
    std::string words;
    for (const std::string& name : hsgd::nccl_net::allowed_interfaces(all, wanted)) {
      words += name + " ";
    }
    return words;
  };
  CHECK_EQ(chosen("eth"), std::string("eth0 eth1 "));
  CHECK_EQ(chosen("=eth0"), std::string("eth0 "));
  CHECK_EQ(chosen("=eth"), std::string());
  CHECK_EQ(chosen("^docker,lo"), std::string("eth0 eth1 ib0 "));
  CHECK_EQ(chosen("^=eth0"), std::string("lo eth1 docker0 ib0 "));
  CHECK_EQ(chosen("ib0:1,eth1"), std::string("eth1 ib0 "));
}
