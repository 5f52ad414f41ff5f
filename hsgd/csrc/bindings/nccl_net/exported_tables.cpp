// The tables of each version, over the calls of plugin.hpp: all that the library exports.
//
// A table is chosen by NCCL, which takes the newest that it knows. Sums between nodes (CollNet)
// would be tables of their own beside these, over the same connections.
#include <algorithm>
#include <array>
#include <cstddef>

#include "bindings/nccl_net/frames.hpp"
#include "bindings/nccl_net/nccl_tables.hpp"
#include "bindings/nccl_net/plugin.hpp"

namespace hsgd::nccl_net {
namespace {

constexpr const char* kName = "hsgd";
// NCCL's tuner adds it to each step between nodes. A guess: TCP over loopback takes half of it.
constexpr float kLatencyUs = 10;
constexpr int kMostComms = 65536;

// --- properties ---

template <class Properties>
void fill(Properties& to, const NetworkDevice& device, int number) {
  to.name = device.name.c_str();
  to.pci_path = device.pci_path.empty() ? nullptr : device.pci_path.c_str();
  to.guid = static_cast<uint64_t>(number);
  to.ptr_support = kHostMemory;
  to.speed_mbps = device.speed_mbps;
  to.port = 0;
  to.latency_us = kLatencyUs;
  to.max_comms = kMostComms;
  to.max_recvs = static_cast<int>(kMostGrouped);
}

void fill(PropertiesV7& to, const NetworkDevice& device, int number) {
  fill(to.first, device, number);
}

template <int kMost>
void fill(PropertiesV9<kMost>& to, const NetworkDevice& device, int number) {
  fill<PropertiesV9<kMost>>(to, device, number);
  to.virtual_device.count = 1;
  to.virtual_device.devices[0] = number;
  to.max_p2p_bytes = kMostTransferBytes;
  to.max_coll_bytes = kMostTransferBytes;
}

void fill(PropertiesV11& to, const NetworkDevice& device, int number) {
  fill(to.first, device, number);
  to.max_multi_request_size = 1;
}

void fill(PropertiesV12& to, const NetworkDevice& device, int number) {
  fill(to.first, device, number);
  to.max_multi_request_size = 1;
  to.rail_id = kNoId;
  to.plane_id = kNoId;
}

// What is not set stays 0: memory is registered for one connection, receives need no flush, and
// nothing is offloaded to the device.
template <class Properties>
Result get_properties(int number, Properties* properties) {
  const NetworkDevice* device = find_device(number);
  if (device == nullptr) return kInternalError;
  *properties = Properties{};
  fill(*properties, *device, number);
  return kSuccess;
}

// --- calls that changed between versions ---

Result init_v10(Logger logger, Profiler) { return init(logger); }

Result init_v11(void** context, uint64_t, CommConfig*, Logger logger, Profiler) {
  const Result result = init(logger);
  return result == kSuccess ? make_context(context) : result;
}

Result listen_v11(void*, int device, void* handle, void** listen_comm) {
  return listen(device, handle, listen_comm);
}

Result connect_v6(int, void* handle, void** send_comm) {
  return connect(only_context(), handle, send_comm);
}

Result connect_v7(int, void* handle, void** send_comm, DeviceHandle**) {
  return connect(only_context(), handle, send_comm);
}

Result connect_v10(int, CommConfig*, void* handle, void** send_comm, DeviceHandle**) {
  return connect(only_context(), handle, send_comm);
}

Result connect_v11(void* context, int, void* handle, void** send_comm, DeviceHandle**) {
  return connect(*static_cast<Context*>(context), handle, send_comm);
}

Result accept_v7(void* listen_comm, void** recv_comm, DeviceHandle**) {
  return accept(listen_comm, recv_comm);
}

template <class Bytes>
Result reg_mr_of(void*, void*, Bytes, int kind, void** mhandle) {
  return reg_mr(kind, mhandle);
}

template <class Bytes>
Result isend_v6(void* send_comm, void* data, Bytes bytes, int tag, void*, void** request) {
  return isend(send_comm, data, static_cast<size_t>(bytes), tag, request);
}

Result isend_v10(void* send_comm, void* data, size_t bytes, int tag, void*, void*, void** request) {
  return isend(send_comm, data, bytes, tag, request);
}

template <class Bytes>
Result irecv_v6(void* recv_comm, int count, void** data, Bytes* bytes, int* tags, void**,
                void** request) {
  std::array<size_t, kMostGrouped> sizes{};
  const int known = std::min(count, static_cast<int>(kMostGrouped));  // irecv() refuses more
  for (int i = 0; i < known; ++i) sizes[static_cast<size_t>(i)] = static_cast<size_t>(bytes[i]);
  return irecv(recv_comm, count, data, sizes.data(), tags, request);
}

Result irecv_v10(void* recv_comm, int count, void** data, size_t* bytes, int* tags, void**, void**,
                 void** request) {
  return irecv(recv_comm, count, data, bytes, tags, request);
}

// --- calls that do nothing ---

Result dereg_mr(void*, void*) { return kSuccess; }

// What a receive wrote into host memory is there when test() says so.
Result iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return kSuccess;
}

Result set_attributes(void*, void*) { return kSuccess; }

// --- tables ---

template <class Table>
constexpr Table fill_calls(Table table) {
  table.name = kName;
  table.devices = count_devices;
  table.reg_mr_dma_buf = nullptr;  // not asked for, by the properties
  table.dereg_mr = dereg_mr;
  table.iflush = iflush;
  table.test = test;
  table.close_send = close_send;
  table.close_recv = close_recv;
  table.close_listen = close_listen;
  return table;
}

constexpr NetV6 make_v6() {
  NetV6 table{};
  table.init = init;
  table.get_properties = get_properties<PropertiesV6>;
  table.listen = listen;
  table.connect = connect_v6;
  table.accept = accept;
  table.reg_mr = reg_mr_of<int>;
  table.isend = isend_v6<int>;
  table.irecv = irecv_v6<int>;
  return fill_calls(table);
}

// Versions 7 to 9, which differ in types alone.
template <class Net, class Properties, class RegisteredBytes, class Bytes>
constexpr Net make_v7() {
  Net net{};
  auto& table = net.calls;
  table.init = init;
  table.get_properties = get_properties<Properties>;
  table.listen = listen;
  table.connect = connect_v7;
  table.accept = accept_v7;
  table.reg_mr = reg_mr_of<RegisteredBytes>;
  table.isend = isend_v6<Bytes>;
  table.irecv = irecv_v6<Bytes>;
  table = fill_calls(table);
  return net;
}

constexpr NetV10 make_v10() {
  NetV10 net{};
  auto& table = net.calls;
  table.init = init_v10;
  table.get_properties = get_properties<PropertiesV10>;
  table.listen = listen;
  table.connect = connect_v10;
  table.accept = accept_v7;
  table.reg_mr = reg_mr_of<size_t>;
  table.isend = isend_v10;
  table.irecv = irecv_v10;
  table = fill_calls(table);
  return net;
}

template <class Properties>
constexpr NetV11<Properties> make_v11() {
  NetV11<Properties> net{};
  auto& table = net.calls;
  table.init = init_v11;
  table.get_properties = get_properties<Properties>;
  table.listen = listen_v11;
  table.connect = connect_v11;
  table.accept = accept_v7;
  table.reg_mr = reg_mr_of<size_t>;
  table.isend = isend_v10;
  table.irecv = irecv_v10;
  table = fill_calls(table);
  net.finalize = drop_context;
  net.set_attributes = set_attributes;
  return net;
}

}  // namespace
}  // namespace hsgd::nccl_net

// NCCL finds these by name. It may write to none of them.
extern "C" {
using namespace hsgd::nccl_net;
HSGD_API extern const NetV6 ncclNetPlugin_v6;
HSGD_API extern const NetV7 ncclNetPlugin_v7;
HSGD_API extern const NetV8 ncclNetPlugin_v8;
HSGD_API extern const NetV9 ncclNetPlugin_v9;
HSGD_API extern const NetV10 ncclNetPlugin_v10;
HSGD_API extern const NetV11<PropertiesV11> ncclNetPlugin_v11;
HSGD_API extern const NetV12 ncclNetPlugin_v12;
const NetV6 ncclNetPlugin_v6 = make_v6();
const NetV7 ncclNetPlugin_v7 = make_v7<NetV7, PropertiesV7, int, int>();
const NetV8 ncclNetPlugin_v8 = make_v7<NetV8, PropertiesV8, size_t, int>();
const NetV9 ncclNetPlugin_v9 = make_v7<NetV9, PropertiesV10, size_t, size_t>();
const NetV10 ncclNetPlugin_v10 = make_v10();
const NetV11<PropertiesV11> ncclNetPlugin_v11 = make_v11<PropertiesV11>();
const NetV12 ncclNetPlugin_v12 = make_v11<PropertiesV12>();
}
