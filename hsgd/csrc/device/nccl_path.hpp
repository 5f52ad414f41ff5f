// NcclPath: runs a collective on device memory over NCCL: completely on one node; between nodes
// each rank's slice of a chunk goes through host memory.
//
// Owns the group of the node's devices and the check of awaited ranks: NCCL's kernels wait forever
// for a rank that died, so this checks for deaths and ends the kernels.
#ifndef HSGD_DEVICE_NCCL_PATH_HPP_
#define HSGD_DEVICE_NCCL_PATH_HPP_

#include <cstdint>
#include <memory>
#include <string>

#include "device/device_call.hpp"
#include "device/device_resources.hpp"
#include "device/host_path.hpp"
#include "device/nccl.hpp"

namespace hsgd {

class NcclPath final : public DeviceGuard {
 public:
  struct Settings {
    std::shared_ptr<const NcclLibrary> library;
    NcclId id{};             // of the node
    hsgd_comm* comm;         // all ranks
    hsgd_comm* between;      // ranks of other nodes with this local rank; nullptr on one node
    size_t slice_bytes = 0;  // of a rank's part of a chunk
    unsigned slots = 4;
  };
  // Creates the path; all ranks of the node must call it, with the device's context current;
  // blocks.
  NcclPath(std::shared_ptr<const Device> device, const Settings& settings);
  ~NcclPath() override;

  // Returns true if this path can run the call; other calls go through host memory.
  bool takes(const DeviceCall& call) const;
  // Queues the whole call after the present work of stream(); the result is ready when stream() has
  // reached its end.
  void pass(HostPath& path, const DeviceCall& call);
  CudaStream stream() const { return stream_; }

  void look(int64_t waited_ns) override;
  void release() noexcept override { group_->abort(); }
  void leave_behind() noexcept override { left_behind_ = true; }

 private:
  struct Slices;
  class Chunks;
  void on_one_node(const DeviceCall& call);
  void between_nodes(HostPath& path, const DeviceCall& call);
  void scatter(HostPath& path, const DeviceCall& call, const Chunks& chunks, uint64_t index);
  void gather(const DeviceCall& call, const Chunks& chunks, uint64_t index);
  void check_peers();

  std::shared_ptr<const Device> device_;
  const Settings settings_;
  hsgd_topology topology_{};
  std::unique_ptr<NcclGroup> group_;
  OwnStream stream_;
  std::unique_ptr<Slices> slices_;
  OwnEvent drained_;
  bool left_behind_ = false;
  int64_t waited_ns_ = 0;  // length of the exchange thread's wait, at its last look
  int64_t dead_since_ns_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_DEVICE_NCCL_PATH_HPP_
