// Plugin: what the tables of all versions call, in the types of the newest.
//
// Owns the process-wide state, which NCCL's tables force: the list of devices (asked for by number
// alone) and, for versions that know no context, the senders that are connecting. NCCL asks again
// with the same handle until a connection stands; the handle came from another process, so it holds
// no pointer, and its secret is the key.
#ifndef HSGD_BINDINGS_NCCL_NET_PLUGIN_HPP_
#define HSGD_BINDINGS_NCCL_NET_PLUGIN_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "bindings/nccl_net/connector.hpp"
#include "bindings/nccl_net/nccl_tables.hpp"
#include "bindings/nccl_net/network_devices.hpp"

namespace hsgd::nccl_net {

// The senders of one communicator that are connecting.
class Context {
 public:
  // Returns nullptr until the connection stands.
  std::unique_ptr<SendChannel> connect(const Handle& handle, const PluginSettings& settings);

 private:
  std::mutex mutex_;
  std::map<SocketToken, std::unique_ptr<Connector>> connecting_;  // by the sender's secret
};

// Reads the settings at the first call.
Result init(Logger logger) noexcept;
Result make_context(void** context) noexcept;
Result drop_context(void* context) noexcept;
// Returns the context of versions that know none.
Context& only_context();
// Returns the settings that init() read.
const PluginSettings& settings();

Result count_devices(int* count) noexcept;
// Returns nullptr if there is no such device.
const NetworkDevice* find_device(int number) noexcept;

Result listen(int device, void* handle, void** listen_comm) noexcept;
Result connect(Context& context, const void* handle, void** send_comm) noexcept;
Result accept(void* listen_comm, void** recv_comm) noexcept;
Result reg_mr(int kind, void** mhandle) noexcept;
Result isend(void* send_comm, const void* data, size_t bytes, int tag, void** request) noexcept;
Result irecv(void* recv_comm, int count, void** data, const size_t* bytes, const int* tags,
             void** request) noexcept;
// Tests a request; `bytes`: of each of its messages, at most INT_MAX. A complete one is gone then.
Result test(void* request, int* done, int* bytes) noexcept;
Result close_send(void* send_comm) noexcept;
Result close_recv(void* recv_comm) noexcept;
Result close_listen(void* listen_comm) noexcept;

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_PLUGIN_HPP_
