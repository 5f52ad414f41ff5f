// Calls of NCCL's proxy to the network plugin, through the table of any version.
//
// Net has one form for all versions. The log of the plugin is kept, so that tests can read it.
#ifndef HSGD_TESTS_NCCL_PROXY_HPP_
#define HSGD_TESTS_NCCL_PROXY_HPP_

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/nccl_net/frames.hpp"
#include "bindings/nccl_net/nccl_tables.hpp"
#include "core/os/wait.hpp"
#include "support/check.hpp"

namespace proxy {

using hsgd::nccl_net::Handle;
using hsgd::nccl_net::Result;

extern "C" {
extern const hsgd::nccl_net::NetV6 ncclNetPlugin_v6;
extern const hsgd::nccl_net::NetV7 ncclNetPlugin_v7;
extern const hsgd::nccl_net::NetV8 ncclNetPlugin_v8;
extern const hsgd::nccl_net::NetV9 ncclNetPlugin_v9;
extern const hsgd::nccl_net::NetV10 ncclNetPlugin_v10;
extern const hsgd::nccl_net::NetV11<hsgd::nccl_net::PropertiesV11> ncclNetPlugin_v11;
extern const hsgd::nccl_net::NetV12 ncclNetPlugin_v12;
}

struct Log {
  std::mutex mutex;
  std::vector<std::string> warnings;
  std::vector<std::string> infos;
};

inline Log& log() {
  static Log only;
  return only;
}

inline void write_log(int level, unsigned long, const char*, int, const char* format, ...) {
  char line[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  const std::lock_guard<std::mutex> lock(log().mutex);
  (level == hsgd::nccl_net::kWarning ? log().warnings : log().infos).emplace_back(line);
}

// Returns the warnings since the last call.
inline std::vector<std::string> take_warnings() {
  const std::lock_guard<std::mutex> lock(log().mutex);
  return std::exchange(log().warnings, {});
}

// The table of a version, with one signature for each call.
struct Net {
  std::function<Result(void** context)> init;
  std::function<Result(void* context)> finalize;
  std::function<Result(void* context, int device, void* handle, void** listen_comm)> listen;
  std::function<Result(void* context, int device, void* handle, void** send_comm)> connect;
  std::function<Result(void* listen_comm, void** recv_comm)> accept;
  std::function<Result(void* comm, void* data, size_t bytes, int kind, void** mhandle)> reg_mr;
  std::function<Result(void* send_comm, void* data, size_t bytes, int tag, void** request)> isend;
  std::function<Result(void* recv_comm, int count, void** data, size_t* bytes, int* tags,
                       void** request)>
      irecv;
  Result (*iflush)(void*, int, void**, int*, void**, void**);
  Result (*test)(void*, int*, int*);
  Result (*close_send)(void*);
  Result (*close_recv)(void*);
  Result (*close_listen)(void*);
};

template <class Calls>
Net shared_calls(const Calls& calls) {
  Net net{};
  net.finalize = [](void*) { return hsgd::nccl_net::kSuccess; };
  net.iflush = calls.iflush;
  net.test = calls.test;
  net.close_send = calls.close_send;
  net.close_recv = calls.close_recv;
  net.close_listen = calls.close_listen;
  return net;
}

// Calls with ints of versions 6 to 8, or with size_t of 9.
template <class Bytes, class Calls>
void add_transfers(Net& net, const Calls& calls) {
  net.isend = [&](void* comm, void* data, size_t bytes, int tag, void** request) {
    return calls.isend(comm, data, static_cast<Bytes>(bytes), tag, nullptr, request);
  };
  net.irecv = [&](void* comm, int count, void** data, size_t* bytes, int* tags, void** request) {
    std::vector<Bytes> sizes(bytes, bytes + count);
    std::vector<void*> mhandles(static_cast<size_t>(count));
    return calls.irecv(comm, count, data, sizes.data(), tags, mhandles.data(), request);
  };
}

template <class Calls>
void add_new_transfers(Net& net, const Calls& calls) {
  net.isend = [&](void* comm, void* data, size_t bytes, int tag, void** request) {
    return calls.isend(comm, data, bytes, tag, nullptr, nullptr, request);
  };
  net.irecv = [&](void* comm, int count, void** data, size_t* bytes, int* tags, void** request) {
    std::vector<void*> mhandles(static_cast<size_t>(count));
    return calls.irecv(comm, count, data, bytes, tags, mhandles.data(), mhandles.data(), request);
  };
}

template <class Calls>
void add_old_set_up(Net& net, const Calls& calls) {
  net.init = [&](void** context) {
    *context = nullptr;
    if constexpr (std::is_same_v<decltype(calls.init), hsgd::nccl_net::InitV10>) {
      return calls.init(write_log, nullptr);
    } else {
      return calls.init(write_log);
    }
  };
  net.listen = [&](void*, int device, void* handle, void** comm) {
    return calls.listen(device, handle, comm);
  };
  net.connect = [&](void*, int device, void* handle, void** comm) {
    if constexpr (std::is_same_v<decltype(calls.connect), hsgd::nccl_net::ConnectV6>) {
      return calls.connect(device, handle, comm);
    } else if constexpr (std::is_same_v<decltype(calls.connect), hsgd::nccl_net::ConnectV7>) {
      return calls.connect(device, handle, comm, nullptr);
    } else {
      return calls.connect(device, nullptr, handle, comm, nullptr);
    }
  };
  net.accept = [&](void* listen_comm, void** comm) {
    if constexpr (std::is_same_v<decltype(calls.accept), hsgd::nccl_net::AcceptV6>) {
      return calls.accept(listen_comm, comm);
    } else {
      return calls.accept(listen_comm, comm, nullptr);
    }
  };
}

template <class Bytes, class Calls>
void add_registration(Net& net, const Calls& calls) {
  net.reg_mr = [&](void* comm, void* data, size_t bytes, int kind, void** mhandle) {
    return calls.reg_mr(comm, data, static_cast<Bytes>(bytes), kind, mhandle);
  };
}

template <class Bytes, class Registered, class Calls>
Net old_net(const Calls& calls) {
  Net net = shared_calls(calls);
  add_old_set_up(net, calls);
  add_registration<Registered>(net, calls);
  add_transfers<Bytes>(net, calls);
  return net;
}

template <class Table>
Net new_net(const Table& table) {
  const auto& calls = table.calls;
  Net net = shared_calls(calls);
  net.init = [&](void** context) {
    hsgd::nccl_net::CommConfig config{-1};
    return calls.init(context, 7, &config, write_log, nullptr);
  };
  net.finalize = table.finalize;
  net.listen = calls.listen;
  net.connect = [&](void* context, int device, void* handle, void** comm) {
    return calls.connect(context, device, handle, comm, nullptr);
  };
  net.accept = [&](void* listen_comm, void** comm) {
    return calls.accept(listen_comm, comm, nullptr);
  };
  add_registration<size_t>(net, calls);
  add_new_transfers(net, calls);
  return net;
}

inline Net net_of(int version) {
  switch (version) {
    case 6:
      return old_net<int, int>(ncclNetPlugin_v6);
    case 7:
      return old_net<int, int>(ncclNetPlugin_v7.calls);
    case 8:
      return old_net<int, size_t>(ncclNetPlugin_v8.calls);
    case 9:
      return old_net<size_t, size_t>(ncclNetPlugin_v9.calls);
    case 10: {
      Net net = shared_calls(ncclNetPlugin_v10.calls);
      add_old_set_up(net, ncclNetPlugin_v10.calls);
      add_registration<size_t>(net, ncclNetPlugin_v10.calls);
      add_new_transfers(net, ncclNetPlugin_v10.calls);
      return net;
    }
    case 11:
      return new_net(ncclNetPlugin_v11);
    default:
      return new_net(ncclNetPlugin_v12);
  }
}

constexpr double kLimitS = 60;

// A connection between two parts of this process, and its contexts.
struct Pair {
  explicit Pair(const Net& used) : net(used) {
    CHECK_EQ(net.init(&context), hsgd::nccl_net::kSuccess);
    CHECK_EQ(net.listen(context, 0, &handle, &listening), hsgd::nccl_net::kSuccess);
    const hsgd::Deadline deadline(kLimitS);
    while ((sender == nullptr || receiver == nullptr) && !deadline.passed()) {
      if (sender == nullptr) {
        CHECK_EQ(net.connect(context, 0, &handle, &sender), hsgd::nccl_net::kSuccess);
      }
      if (receiver == nullptr) {
        CHECK_EQ(net.accept(listening, &receiver), hsgd::nccl_net::kSuccess);
      }
    }
    CHECK(sender != nullptr && receiver != nullptr);
  }
  ~Pair() {
    if (sender != nullptr) net.close_send(sender);
    if (receiver != nullptr) net.close_recv(receiver);
    if (listening != nullptr) net.close_listen(listening);
    net.finalize(context);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  void* send(void* data, size_t bytes, int tag) {
    void* request = nullptr;
    CHECK_EQ(net.isend(sender, data, bytes, tag, &request), hsgd::nccl_net::kSuccess);
    return request;
  }
  void* receive(void* data, size_t bytes, int tag) {
    void* request = nullptr;
    CHECK_EQ(net.irecv(receiver, 1, &data, &bytes, &tag, &request), hsgd::nccl_net::kSuccess);
    return request;
  }
  bool is_done(void* request, int* bytes = nullptr) const {
    int done = 0;
    CHECK_EQ(net.test(request, &done, bytes), hsgd::nccl_net::kSuccess);
    return done != 0;
  }
  // Waits for both. Returns the bytes that the receive got.
  int finish(void* sent, void* received) const {
    const hsgd::Deadline deadline(kLimitS);
    int bytes = -1;
    while ((sent != nullptr || received != nullptr) && !deadline.passed()) {
      if (sent != nullptr && is_done(sent)) sent = nullptr;
      if (received != nullptr && is_done(received, &bytes)) received = nullptr;
    }
    CHECK(sent == nullptr && received == nullptr);
    return bytes;
  }

  Net net;
  void* context = nullptr;
  Handle handle{};
  void* listening = nullptr;
  void* sender = nullptr;
  void* receiver = nullptr;
};

}  // namespace proxy

#endif  // HSGD_TESTS_NCCL_PROXY_HPP_
