// Tables of functions by which NCCL calls a network plugin, versions 6 to 12 of the interface.
//
// NCCL 2.18 looks for version 6, 2.32 for 12 and all before. Layouts are those that NCCL publishes
// (ext-net and src/include/plugin/net of its sources); sizes and offsets are checked below. Holds
// no function. A type that no version changed has no number in its name.
#ifndef HSGD_BINDINGS_NCCL_NET_NCCL_TABLES_HPP_
#define HSGD_BINDINGS_NCCL_NET_NCCL_TABLES_HPP_

#include <cstddef>
#include <cstdint>

namespace hsgd::nccl_net {

// ncclResult_t
enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidUsage = 5,
  kRemoteError = 6
};

// ncclDebugLogger_t, two of its levels and two of its subsystems
using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);
constexpr int kWarning = 2;
constexpr int kInfo = 3;
constexpr unsigned long kInitSubsystem = 0x1;
constexpr unsigned long kNetSubsystem = 0x10;

using Profiler = Result (*)(void** event, int type, void* parent, int64_t plugin, void* data);

constexpr size_t kHandleBytes = 128;  // of what listen() returns for connect()
constexpr int kHostMemory = 1;        // kind of memory of regMr(), and a bit of `ptr_support`
constexpr size_t kMostRequests = 32;  // open ones of a connection, each with a group of receives
constexpr size_t kMostTransferBytes = size_t{1} << 40;
constexpr int kNoId = -1;

// Set by plugins that offload work to the device; this one never does.
struct DeviceHandle;

// --- properties of a device ---

struct PropertiesV6 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int ptr_support;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_recvs;
};
static_assert(sizeof(PropertiesV6) == 48 && offsetof(PropertiesV6, max_recvs) == 44);

struct PropertiesV7 {
  PropertiesV6 first;
  int device_type;
  int device_version;
};
static_assert(sizeof(PropertiesV7) == 56 && offsetof(PropertiesV7, device_type) == 48);

struct PropertiesV8 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int ptr_support;
  int reg_is_global;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_recvs;
  int device_type;
  int device_version;
};
static_assert(sizeof(PropertiesV8) == 64 && offsetof(PropertiesV8, device_version) == 56);

// Several devices that are used as one.
template <int kMost>
struct VirtualDevice {
  int count;
  int devices[kMost];
};

template <int kMostDevices>
struct PropertiesV9 {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int ptr_support;
  int reg_is_global;
  int force_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_recvs;
  int device_type;
  int device_version;
  VirtualDevice<kMostDevices> virtual_device;
  size_t max_p2p_bytes;
  size_t max_coll_bytes;
};
using PropertiesV10 = PropertiesV9<4>;  // also of version 9
static_assert(sizeof(PropertiesV10) == 104 && offsetof(PropertiesV10, virtual_device) == 64 &&
              offsetof(PropertiesV10, max_p2p_bytes) == 88);

struct PropertiesV11 {
  PropertiesV9<4> first;
  int max_multi_request_size;
};
static_assert(sizeof(PropertiesV11) == 112 &&
              offsetof(PropertiesV11, max_multi_request_size) == 104);

struct PropertiesV12 {
  PropertiesV9<8> first;
  int max_multi_request_size;
  int16_t rail_id;
  int16_t plane_id;
};
static_assert(sizeof(PropertiesV12) == 128 && offsetof(PropertiesV12, first.max_p2p_bytes) == 104 &&
              offsetof(PropertiesV12, rail_id) == 124);

struct CommConfig {
  int traffic_class;
};

// --- functions, in the order of the tables ---

// Types of those that changed between versions.
template <class Init, class GetProperties, class Listen, class Connect, class Accept, class RegMr,
          class Isend, class Irecv>
struct Calls {
  const char* name;
  Init init;
  Result (*devices)(int* count);
  GetProperties get_properties;
  Listen listen;
  Connect connect;
  Accept accept;
  RegMr reg_mr;
  Result (*reg_mr_dma_buf)(void* comm, void* data, size_t bytes, int kind, uint64_t offset, int fd,
                           void** mhandle);
  Result (*dereg_mr)(void* comm, void* mhandle);
  Isend isend;
  Irecv irecv;
  Result (*iflush)(void* recv_comm, int count, void** data, int* bytes, void** mhandles,
                   void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* send_comm);
  Result (*close_recv)(void* recv_comm);
  Result (*close_listen)(void* listen_comm);
};

using InitV6 = Result (*)(Logger);
using InitV10 = Result (*)(Logger, Profiler);
using InitV11 = Result (*)(void** context, uint64_t comm_id, CommConfig*, Logger, Profiler);
using ListenV6 = Result (*)(int device, void* handle, void** listen_comm);
using ListenV11 = Result (*)(void* context, int device, void* handle, void** listen_comm);
using ConnectV6 = Result (*)(int device, void* handle, void** send_comm);
using ConnectV7 = Result (*)(int device, void* handle, void** send_comm, DeviceHandle**);
using ConnectV10 = Result (*)(int device, CommConfig*, void* handle, void** send_comm,
                              DeviceHandle**);
using ConnectV11 = Result (*)(void* context, int device, void* handle, void** send_comm,
                              DeviceHandle**);
using AcceptV6 = Result (*)(void* listen_comm, void** recv_comm);
using AcceptV7 = Result (*)(void* listen_comm, void** recv_comm, DeviceHandle**);
template <class Bytes>
using RegMr = Result (*)(void* comm, void* data, Bytes bytes, int kind, void** mhandle);
template <class Bytes>
using IsendV6 = Result (*)(void* send_comm, void* data, Bytes bytes, int tag, void* mhandle,
                           void** request);
using IsendV10 = Result (*)(void* send_comm, void* data, size_t bytes, int tag, void* mhandle,
                            void* phandle, void** request);
template <class Bytes>
using IrecvV6 = Result (*)(void* recv_comm, int count, void** data, Bytes* bytes, int* tags,
                           void** mhandles, void** request);
using IrecvV10 = Result (*)(void* recv_comm, int count, void** data, size_t* bytes, int* tags,
                            void** mhandles, void** phandles, void** request);
template <class Properties>
using GetProperties = Result (*)(int device, Properties* properties);

using NetV6 = Calls<InitV6, GetProperties<PropertiesV6>, ListenV6, ConnectV6, AcceptV6, RegMr<int>,
                    IsendV6<int>, IrecvV6<int>>;
static_assert(sizeof(NetV6) == 17 * 8 && offsetof(NetV6, isend) == 10 * 8);

// What versions from 7 on have behind: for memory of devices that offload.
struct DeviceCalls {
  Result (*get_device_mr)(void* comm, void* mhandle, void** device_mhandle);
  Result (*irecv_consumed)(void* recv_comm, int count, void* request);
};

struct NetV7 {
  Calls<InitV6, GetProperties<PropertiesV7>, ListenV6, ConnectV7, AcceptV7, RegMr<int>,
        IsendV6<int>, IrecvV6<int>>
      calls;
  DeviceCalls device;
};
static_assert(sizeof(NetV7) == 19 * 8);

struct NetV8 {
  Calls<InitV6, GetProperties<PropertiesV8>, ListenV6, ConnectV7, AcceptV7, RegMr<size_t>,
        IsendV6<int>, IrecvV6<int>>
      calls;
  DeviceCalls device;
};
static_assert(sizeof(NetV8) == 19 * 8);

struct NetV9 {
  Calls<InitV6, GetProperties<PropertiesV10>, ListenV6, ConnectV7, AcceptV7, RegMr<size_t>,
        IsendV6<size_t>, IrecvV6<size_t>>
      calls;
  DeviceCalls device;
  Result (*make_virtual_device)(int* device, void* devices);
};
static_assert(sizeof(NetV9) == 20 * 8);

struct NetV10 {
  Calls<InitV10, GetProperties<PropertiesV10>, ListenV6, ConnectV10, AcceptV7, RegMr<size_t>,
        IsendV10, IrecvV10>
      calls;
  DeviceCalls device;
  Result (*make_virtual_device)(int* device, void* devices);
};
static_assert(sizeof(NetV10) == 20 * 8);

// Versions 11 and 12.
template <class Properties>
struct NetV11 {
  Calls<InitV11, GetProperties<Properties>, ListenV11, ConnectV11, AcceptV7, RegMr<size_t>,
        IsendV10, IrecvV10>
      calls;
  DeviceCalls device;
  Result (*make_virtual_device)(int* device, void* devices);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};
using NetV12 = NetV11<PropertiesV12>;
static_assert(sizeof(NetV12) == 22 * 8 && offsetof(NetV12, finalize) == 20 * 8);

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_NCCL_TABLES_HPP_
