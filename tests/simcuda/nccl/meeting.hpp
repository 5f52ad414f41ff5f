// How the ranks of a communicator find each other: at an abstract socket that the id names.
//
// Owns the sockets and the file descriptor of the memory that the ranks share. Nothing has a name
// in a file system.
#ifndef SIMCUDA_NCCL_MEETING_HPP_
#define SIMCUDA_NCCL_MEETING_HPP_

#include <string>

#include "nccl_types.hpp"

namespace simnccl {

// Begins to listen, in a thread that serves one communicator. False: the system refused.
bool open_meeting(ncclUniqueId* id);

struct Meeting {
  ncclResult_t result;
  std::string why;  // of a result other than ncclSuccess
  int fd;           // of the shared memory, the caller's
};

// Blocks until all ranks are there. `uuid`: of the GPU, 16 bytes; two ranks may not have the same.
Meeting join_meeting(const ncclUniqueId& id, int rank, int size, const std::string& uuid);

}  // namespace simnccl

#endif  // SIMCUDA_NCCL_MEETING_HPP_
