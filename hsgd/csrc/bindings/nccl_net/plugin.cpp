#include "bindings/nccl_net/plugin.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings/nccl_net/acceptor.hpp"
#include "bindings/nccl_net/plugin_log.hpp"
#include "bindings/nccl_net/receive_channel.hpp"
#include "bindings/nccl_net/send_channel.hpp"
#include "core/base/error.hpp"

namespace hsgd::nccl_net {
namespace {

struct Process {
  std::mutex mutex;  // of init()
  std::optional<PluginSettings> settings;
  Context context;
};

// Never destroyed: at the end of a program a thread of NCCL may still be connecting.
Process& process() {
  static auto* const only = new Process;
  return *only;
}

std::string words_of(const PluginSettings& settings) {
  std::string words;
  for (const NetworkDevice& device : settings.devices) {
    words +=
        text("%s%s (%d Mbit/s)", words.empty() ? "" : ", ", device.name.c_str(), device.speed_mbps);
  }
  return text("TCP over %s; %u connections of each pair; time limit %g s", words.c_str(),
              kConnections, settings.timeout_s);
}

}  // namespace

std::unique_ptr<SendChannel> Context::connect(const Handle& handle,
                                              const PluginSettings& settings) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // NCCL may find another way to the same peer, and then does not ask again.
  for (auto each = connecting_.begin(); each != connecting_.end();) {
    const bool is_other = each->first != handle.sender_token;
    each = is_other && each->second->is_abandoned() ? connecting_.erase(each) : std::next(each);
  }
  auto found = connecting_.find(handle.sender_token);
  if (found == connecting_.end()) {
    auto made = std::make_unique<Connector>(handle, settings.interfaces(), settings.timeout_s);
    found = connecting_.emplace(handle.sender_token, std::move(made)).first;
  }
  try {
    std::unique_ptr<SendChannel> channel = found->second->step();
    if (channel != nullptr) connecting_.erase(found);
    return channel;
  } catch (...) {
    connecting_.erase(found);
    throw;
  }
}

Result init(Logger logger) noexcept {
  set_logger(logger);
  return guarded([] {
    const std::lock_guard<std::mutex> lock(process().mutex);
    if (!process().settings.has_value()) process().settings = read_settings();
    log_info(words_of(*process().settings));
  });
}

Result make_context(void** context) noexcept {
  return guarded([&] { *context = new Context; });
}

Result drop_context(void* context) noexcept {
  delete static_cast<Context*>(context);
  return kSuccess;
}

Context& only_context() { return process().context; }

// NCCL calls nothing of a table before init() has succeeded.
const PluginSettings& settings() {
  HSGD_CHECK(process().settings.has_value());
  return *process().settings;
}

Result count_devices(int* count) noexcept {
  *count = static_cast<int>(settings().devices.size());
  return kSuccess;
}

const NetworkDevice* find_device(int number) noexcept {
  const auto& devices = settings().devices;
  const bool is_known = number >= 0 && static_cast<size_t>(number) < devices.size();
  return is_known ? &devices[static_cast<size_t>(number)] : nullptr;
}

Result listen(int device, void* handle, void** listen_comm) noexcept {
  *listen_comm = nullptr;
  if (find_device(device) == nullptr) return kInternalError;
  return guarded([&] {
    const PluginSettings& ours = settings();
    const std::string where =
        ours.interfaces(static_cast<size_t>(device)) + (ours.ports.empty() ? "" : ";" + ours.ports);
    Handle made{};
    *listen_comm = std::make_unique<Acceptor>(where, ours.timeout_s, &made).release();
    std::memcpy(handle, &made, sizeof made);
  });
}

Result connect(Context& context, const void* handle, void** send_comm) noexcept {
  *send_comm = nullptr;
  return guarded([&] {
    Handle theirs;
    std::memcpy(&theirs, handle, sizeof theirs);
    Channel* channel = context.connect(theirs, settings()).release();
    *send_comm = channel;
  });
}

Result accept(void* listen_comm, void** recv_comm) noexcept {
  *recv_comm = nullptr;
  if (listen_comm == nullptr) return kInternalError;
  return guarded([&] {
    Channel* channel = static_cast<Acceptor*>(listen_comm)->step().release();
    *recv_comm = channel;
  });
}

Result reg_mr(int kind, void** mhandle) noexcept {
  *mhandle = nullptr;
  if (kind == kHostMemory) return kSuccess;
  log_warning("only host memory can be registered: NCCL ignored the properties of the device");
  return kInternalError;
}

Result isend(void* send_comm, const void* data, size_t bytes, int tag, void** request) noexcept {
  *request = nullptr;
  if (send_comm == nullptr) return kInternalError;
  auto& channel = static_cast<SendChannel&>(*static_cast<Channel*>(send_comm));
  return channel.run([&] { *request = channel.send(data, bytes, tag); });
}

Result irecv(void* recv_comm, int count, void** data, const size_t* bytes, const int* tags,
             void** request) noexcept {
  *request = nullptr;
  const bool fits = count >= 1 && static_cast<size_t>(count) <= kMostGrouped;
  if (recv_comm == nullptr || !fits) return kInternalError;
  auto& channel = static_cast<ReceiveChannel&>(*static_cast<Channel*>(recv_comm));
  return channel.run(
      [&] { *request = channel.receive({static_cast<size_t>(count), data, bytes, tags}); });
}

Result test(void* request, int* done, int* bytes) noexcept {
  *done = 0;
  if (request == nullptr) return kInternalError;
  auto& tested = *static_cast<Request*>(request);
  Channel& channel = *tested.channel;
  return channel.run([&] {
    if (tested.open > 0) channel.progress();
    if (tested.open > 0) return;
    for (size_t i = 0; bytes != nullptr && i < tested.count; ++i) {
      bytes[i] = static_cast<int>(std::min<size_t>(tested.bytes[i], INT_MAX));
    }
    *done = 1;
    channel.release(tested);
  });
}

Result close_send(void* send_comm) noexcept {
  delete static_cast<Channel*>(send_comm);
  return kSuccess;
}

Result close_recv(void* recv_comm) noexcept {
  delete static_cast<Channel*>(recv_comm);
  return kSuccess;
}

Result close_listen(void* listen_comm) noexcept {
  delete static_cast<Acceptor*>(listen_comm);
  return kSuccess;
}

}  // namespace hsgd::nccl_net
