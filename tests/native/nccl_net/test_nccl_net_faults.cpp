// The network plugin of NCCL when something goes wrong: processes that die, stop or are strangers,
// messages that do not fit, closes with requests under way; and what is left then: nothing.
#include <arpa/inet.h>
#include <dirent.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"
#include "network/tcp_common/address.hpp"
#include "network/tcp_common/socket.hpp"
#include "support/check.hpp"
#include "support/nccl_proxy.hpp"

namespace {

using hsgd::Deadline;
using hsgd::Fd;
using hsgd::nccl_net::Answer;
using hsgd::nccl_net::Hello;
using hsgd::nccl_net::kConnections;
using hsgd::nccl_net::kGo;
using hsgd::nccl_net::kInvalidUsage;
using hsgd::nccl_net::kMagic;
using hsgd::nccl_net::kMostAhead;
using hsgd::nccl_net::kMostEagerBytes;
using hsgd::nccl_net::kRemoteError;
using hsgd::nccl_net::kSuccess;
using hsgd::nccl_net::Piece;
using proxy::Handle;
using proxy::Net;
using proxy::net_of;
using proxy::Pair;
using proxy::Result;
using Bytes = std::vector<uint8_t>;

// Read once by the plugin, at the first init().
constexpr const char* kTimeoutS = "5";
const int kTimeoutSet = ::setenv("HSGD_TIMEOUT_S", kTimeoutS, 1);

size_t open_descriptors() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

size_t threads() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/task");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// Tests a request until it is complete or fails. Returns the last result.
Result outcome(const Net& net, void* request) {
  const Deadline deadline(proxy::kLimitS);
  int done = 0;
  Result result = kSuccess;
  while (result == kSuccess && done == 0 && !deadline.passed()) {
    result = net.test(request, &done, nullptr);
  }
  return result;
}

bool some_warning_has(const std::string& part) {
  const std::vector<std::string> warnings = proxy::take_warnings();
  return std::any_of(warnings.begin(), warnings.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

// A process that accepts a connection from this one and then waits, without any receive.
struct Child {
  Child() {
    int pipes[2];
    CHECK(::pipe(pipes) == 0);
    pid = ::fork();
    if (pid == 0) {
      const Net own = net_of(12);
      void* own_context = nullptr;
      void* listening = nullptr;
      void* receiver = nullptr;
      Handle made{};
      own.init(&own_context);
      own.listen(own_context, 0, &made, &listening);
      if (::write(pipes[1], &made, sizeof made) != sizeof made) ::_exit(1);
      while (receiver == nullptr) own.accept(listening, &receiver);
      for (;;) ::pause();
    }
    CHECK_EQ(::read(pipes[0], &handle, sizeof handle), static_cast<ssize_t>(sizeof handle));
    ::close(pipes[0]);
    ::close(pipes[1]);
    CHECK_EQ(net.init(&context), kSuccess);
    const Deadline deadline(proxy::kLimitS);
    while (sender == nullptr && !deadline.passed()) {
      CHECK_EQ(net.connect(context, 0, &handle, &sender), kSuccess);
    }
  }
  ~Child() {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    net.close_send(sender);
    net.finalize(context);
  }
  const Net net = net_of(12);
  pid_t pid = -1;
  Handle handle{};
  void* context = nullptr;
  void* sender = nullptr;
};

hsgd::SocketAddress address_of(const Handle& handle) {
  return hsgd::socket_address(unpack_addresses(handle)[0], handle.port);
}

Fd call(const Handle& handle) {
  const hsgd::SocketAddress address = address_of(handle);
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(fd.get(), address.get(), address.bytes) == 0);
  return fd;
}

// Says hello on all connections with the right secret, as a sender does, and accepts it.
std::vector<Fd> pretend_sender(Pair& pair, const Handle& handle, void* listening) {
  std::vector<Fd> connections;
  for (uint32_t i = 0; i < kConnections; ++i) {
    connections.push_back(call(handle));
    const Hello hello{handle.sender_token, kMagic, 1, 77, i, kConnections, "elsewhere"};
    CHECK_EQ(::send(connections[i].get(), &hello, sizeof hello, 0), ssize_t{sizeof hello});
    CHECK_EQ(::send(connections[i].get(), &kGo, sizeof kGo, 0), ssize_t{sizeof kGo});
  }
  const Deadline deadline(proxy::kLimitS);
  pair.net.close_recv(pair.receiver);
  pair.receiver = nullptr;
  while (pair.receiver == nullptr && !deadline.passed()) {
    CHECK_EQ(pair.net.accept(listening, &pair.receiver), kSuccess);
  }
  return connections;
}

}  // namespace

TEST("the death of a receiver fails the sends that wait for it, and names it") {
  Child child;
  Bytes data(1 << 20);
  void* request = nullptr;
  CHECK_EQ(child.net.isend(child.sender, data.data(), data.size(), 0, &request), kSuccess);
  ::kill(child.pid, SIGKILL);
  CHECK_EQ(outcome(child.net, request), kRemoteError);
  CHECK(some_warning_has(hsgd::text("pid %d", child.pid)));
  CHECK_EQ(child.net.isend(child.sender, data.data(), 1, 0, &request), kRemoteError);
  CHECK(!some_warning_has("pid"));  // one line
}

TEST("a stopped receiver fails the sends that wait for it at the deadline") {
  Child child;
  ::kill(child.pid, SIGSTOP);
  Bytes data(1 << 20);
  void* request = nullptr;
  CHECK_EQ(child.net.isend(child.sender, data.data(), data.size(), 0, &request), kSuccess);
  CHECK_EQ(outcome(child.net, request), kRemoteError);
  CHECK(some_warning_has("no byte moved for 5 s"));
}

TEST("a sender that is gone fails the open receives, but not what it had sent") {
  Pair pair(net_of(12));
  Bytes sent(3 << 20, 5);
  Bytes got(sent.size());
  void* first = pair.receive(got.data(), got.size(), 0);
  void* request = pair.send(sent.data(), sent.size(), 0);
  const Deadline deadline(proxy::kLimitS);
  bool has_all = false;
  bool is_sent = false;
  while (!is_sent && !deadline.passed()) {
    is_sent = pair.is_done(request);
    if (!has_all) has_all = pair.is_done(first);
  }
  pair.net.close_send(std::exchange(pair.sender, nullptr));
  if (!has_all) CHECK_EQ(outcome(pair.net, first), kSuccess);
  CHECK(sent == got);
  uint8_t byte = 0;
  CHECK_EQ(outcome(pair.net, pair.receive(&byte, 1, 0)), kRemoteError);
  CHECK(some_warning_has("ended"));
}

TEST("a message that is longer than its receive is an error on both sides") {
  for (const size_t capacity : {size_t{0}, size_t{99}, size_t{20'000}}) {
    Pair pair(net_of(12));
    Bytes sent(20'001);
    Bytes got(sent.size(), 7);
    void* received = pair.receive(got.data(), capacity, 3);
    void* request = nullptr;
    // Of a short receive the sender learns when the receiver has waited for a while.
    const Deadline deadline(proxy::kLimitS);
    Result theirs = kSuccess;
    Result ours = pair.net.isend(pair.sender, sent.data(), sent.size(), 3, &request);
    int done = 0;
    while ((ours == kSuccess || theirs == kSuccess) && !deadline.passed()) {
      if (ours == kSuccess) ours = pair.net.test(request, &done, nullptr);
      if (theirs == kSuccess) theirs = pair.net.test(received, &done, nullptr);
    }
    CHECK_EQ(ours, kInvalidUsage);
    CHECK_EQ(theirs, kInvalidUsage);
    CHECK(some_warning_has("20001 bytes (tag 3)"));
    CHECK(std::all_of(got.begin(), got.end(), [](uint8_t byte) { return byte == 7; }));
  }
}

TEST("a short message that is longer than its receive is an error of the receiver") {
  for (const bool comes_early : {false, true}) {
    Pair pair(net_of(12));
    Bytes sent(100);
    Bytes got(sent.size(), 7);
    if (comes_early) {
      pair.finish(pair.send(sent.data(), sent.size(), 3), nullptr);
      pair.finish(pair.send(sent.data(), 1, 4), pair.receive(got.data() + 99, 1, 4));
    }
    void* request = nullptr;
    void* data = got.data();
    size_t capacity = 99;
    int tag = 3;
    Result result = pair.net.irecv(pair.receiver, 1, &data, &capacity, &tag, &request);
    if (!comes_early) pair.send(sent.data(), sent.size(), 3);
    if (result == kSuccess) result = outcome(pair.net, request);
    CHECK_EQ(result, kInvalidUsage);
    CHECK(some_warning_has("100 bytes (tag 3)"));
    CHECK(std::all_of(got.begin(), got.end() - 1, [](uint8_t byte) { return byte == 7; }));
  }
}

TEST("a send after the receiver closed fails, even if it is short") {
  Pair pair(net_of(12));
  pair.net.close_recv(std::exchange(pair.receiver, nullptr));
  uint8_t byte = 0;
  void* request = nullptr;
  const Deadline deadline(proxy::kLimitS);
  Result result = kSuccess;
  while (result == kSuccess && !deadline.passed()) {
    result = pair.net.isend(pair.sender, &byte, 1, 0, &request);
  }
  CHECK_EQ(result, kRemoteError);
  CHECK(some_warning_has("ended"));
}

TEST("what was sent before the sender closed arrives, however late it is received") {
  Pair pair(net_of(12));
  std::vector<Bytes> sent;
  for (size_t i = 0; i < kMostAhead; ++i) {
    sent.emplace_back(kMostEagerBytes, static_cast<uint8_t>(i));
    pair.finish(pair.send(sent.back().data(), kMostEagerBytes, 0), nullptr);
  }
  pair.net.close_send(std::exchange(pair.sender, nullptr));
  for (const Bytes& expected : sent) {
    Bytes got(2 * kMostEagerBytes);
    int bytes = 0;
    void* request = pair.receive(got.data(), got.size(), 0);
    const Deadline deadline(proxy::kLimitS);
    while (!pair.is_done(request, &bytes) && !deadline.passed()) {
    }
    CHECK_EQ(bytes, static_cast<int>(kMostEagerBytes));
    CHECK(std::equal(expected.begin(), expected.end(), got.begin()));
  }
}

TEST("closes return at once with requests under way, and nothing is left") {
  uint8_t warm_up = 0;
  {
    Pair pair(net_of(12));
    pair.finish(pair.send(&warm_up, 1, 0), pair.receive(&warm_up, 1, 0));
  }
  const size_t descriptors = open_descriptors();
  const size_t tasks = threads();
  for (int round = 0; round < 20; ++round) {
    Bytes sent(8 << 20);
    Bytes got(sent.size());
    Pair pair(net_of(round % 2 == 0 ? 12 : 6));
    void* received = pair.receive(got.data(), got.size(), 0);
    void* request = pair.send(sent.data(), sent.size(), 0);
    for (int i = 0; i < round; ++i) {
      pair.is_done(request);
      pair.is_done(received);
    }
    pair.receive(got.data(), 1, 1);
    pair.send(sent.data(), 1, 2);
  }
  CHECK_EQ(open_descriptors(), descriptors);
  CHECK_EQ(threads(), tasks);
}

TEST("a connection that is given up before it stands leaves nothing after finalize") {
  const Net net = net_of(12);
  void* first = nullptr;
  void* context = nullptr;
  CHECK_EQ(net.init(&first), kSuccess);
  const size_t descriptors = open_descriptors();
  CHECK_EQ(net.init(&context), kSuccess);
  Handle handle{};
  void* listening = nullptr;
  void* sender = nullptr;
  CHECK_EQ(net.listen(context, 0, &handle, &listening), kSuccess);
  CHECK_EQ(net.connect(context, 0, &handle, &sender), kSuccess);
  CHECK(sender == nullptr);
  net.close_listen(listening);
  net.finalize(context);
  CHECK_EQ(open_descriptors(), descriptors);
  net.finalize(first);
}

TEST("a flood of strangers does not keep a sender out") {
  const Net net = net_of(12);
  void* context = nullptr;
  CHECK_EQ(net.init(&context), kSuccess);
  Handle handle{};
  void* listening = nullptr;
  void* sender = nullptr;
  void* receiver = nullptr;
  CHECK_EQ(net.listen(context, 0, &handle, &listening), kSuccess);
  std::vector<Fd> strangers;
  for (int i = 0; i < 150; ++i) {
    strangers.push_back(call(handle));
    Hello hello{handle.sender_token, kMagic, 1, 5, 0, kConnections, "stranger"};
    hello.token[3] ^= 1;
    if (i % 3 == 1) ::send(strangers.back().get(), &hello, sizeof hello, 0);
    if (i % 3 == 2) ::send(strangers.back().get(), "GET / HTTP/1.1\r\n", 16, 0);
  }
  const Deadline deadline(proxy::kLimitS);
  Result result = kSuccess;
  while ((sender == nullptr || receiver == nullptr) && result == kSuccess && !deadline.passed()) {
    if (sender == nullptr) result = net.connect(context, 0, &handle, &sender);
    if (receiver == nullptr && result == kSuccess) result = net.accept(listening, &receiver);
  }
  CHECK_EQ(result, kSuccess);
  CHECK(sender != nullptr && receiver != nullptr);
  net.close_send(sender);
  net.close_recv(receiver);
  net.close_listen(listening);
  net.finalize(context);
}

TEST("a process that took over the port of a dead receiver is not believed") {
  const Net net = net_of(12);
  void* context = nullptr;
  CHECK_EQ(net.init(&context), kSuccess);
  Handle handle{};
  void* listening = nullptr;
  void* sender = nullptr;
  CHECK_EQ(net.listen(context, 0, &handle, &listening), kSuccess);
  Handle wrong = handle;
  wrong.receiver_token[0] ^= 1;
  void* receiver = nullptr;
  const Deadline deadline(proxy::kLimitS);
  Result result = kSuccess;
  while (result == kSuccess && sender == nullptr && !deadline.passed()) {
    result = net.connect(context, 0, &wrong, &sender);
    net.accept(listening, &receiver);
  }
  CHECK_EQ(result, kRemoteError);
  CHECK(some_warning_has("does not know the secret"));
  CHECK(receiver == nullptr);
  net.close_listen(listening);
  net.finalize(context);
}

TEST("a handle of something else, and a receiver that is gone, are errors") {
  const Net net = net_of(12);
  void* context = nullptr;
  CHECK_EQ(net.init(&context), kSuccess);
  std::array<uint8_t, sizeof(Handle)> noise{};
  noise.fill(0x5a);
  void* sender = nullptr;
  CHECK_EQ(net.connect(context, 0, noise.data(), &sender), kInvalidUsage);
  Handle handle{};
  void* listening = nullptr;
  CHECK_EQ(net.listen(context, 0, &handle, &listening), kSuccess);
  net.close_listen(listening);
  const Deadline deadline(proxy::kLimitS);
  Result result = kSuccess;
  while (result == kSuccess && !deadline.passed()) {
    result = net.connect(context, 0, &handle, &sender);
  }
  CHECK_EQ(result, kRemoteError);
  CHECK(some_warning_has("did not accept a connection"));
  net.finalize(context);
}

TEST("a sender with the secret that breaks the rules writes nowhere but into its receive") {
  const std::vector<Piece> wrong = {
      {kMagic + 1, 8, 0, 0, 0, 8, 0},           // another format
      {kMagic, 8, 0, 0, kMostAhead + 1, 8, 0},  // too far ahead
      {kMagic, 8, 1, 0, 0, 1 << 20, 0},         // long, and before its receive
      {kMagic, 8, 0, 0, 0, 16, 12},             // ends behind the message
      {kMagic, 8, 0, 0, 0, 8, UINT64_MAX},      // begins there
      {kMagic, 1 << 20, 0, 0, 0, 1 << 21, 0}    // longer than the receive
  };
  for (const Piece& piece : wrong) {
    Pair pair(net_of(12));
    Handle handle{};
    void* listening = nullptr;
    CHECK_EQ(pair.net.listen(pair.context, 0, &handle, &listening), kSuccess);
    const std::vector<Fd> connections = pretend_sender(pair, handle, listening);
    Bytes got(64, 9);
    void* received = pair.receive(got.data() + 16, 32, 0);
    CHECK_EQ(::send(connections[1].get(), &piece, sizeof piece, 0), ssize_t{sizeof piece});
    CHECK(outcome(pair.net, received) != kSuccess);
    CHECK(std::all_of(got.begin(), got.end(), [](uint8_t byte) { return byte == 9; }));
    pair.net.close_listen(listening);
  }
  proxy::take_warnings();
}

TEST("a piece that comes twice at the same time is refused") {
  Pair pair(net_of(12));
  Handle handle{};
  void* listening = nullptr;
  CHECK_EQ(pair.net.listen(pair.context, 0, &handle, &listening), kSuccess);
  const std::vector<Fd> connections = pretend_sender(pair, handle, listening);
  Bytes got(32);
  void* received = pair.receive(got.data(), got.size(), 0);
  const Piece piece{kMagic, 32, 0, 0, 0, 32, 0};
  for (const size_t i : {1, 2}) ::send(connections[i].get(), &piece, sizeof piece, 0);
  CHECK_EQ(outcome(pair.net, received), kRemoteError);
  CHECK(some_warning_has("invalid data"));
  pair.net.close_listen(listening);
}
