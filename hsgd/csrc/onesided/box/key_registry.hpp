// BoxDoor: gives a parameter box to processes that ask for its key; any holder can answer.
//
// Owns the listening socket and a thread that answers. The name is abstract, "@hsgd-box-UID-KEY",
// and belongs to the network namespace. Every holder has a descriptor of the same socket, so the
// name lives exactly as long as any holder, and no other box can take it meanwhile. Never maps
// memory.
#ifndef HSGD_ONESIDED_BOX_KEY_REGISTRY_HPP_
#define HSGD_ONESIDED_BOX_KEY_REGISTRY_HPP_

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"

namespace hsgd {

// The descriptors that a holder sends to a new one.
struct BoxHandover {
  Fd segment;
  Fd door;  // the listening socket
  size_t bytes = 0;
};

// Claims the key. Throws HSGD_ERR_ARGUMENT if another box has it or it is invalid.
Fd claim_box_key(const std::string& key);
// Asks a holder of the key's box for its descriptors; blocks. Throws HSGD_ERR_TIMEOUT, saying
// whether no process has the key or its holders do not answer.
BoxHandover ask_for_box(const std::string& key, const Deadline& deadline);

class BoxDoor {
 public:
  // Starts the thread, which sends duplicates of the descriptors.
  explicit BoxDoor(BoxHandover given);
  ~BoxDoor();
  BoxDoor(const BoxDoor&) = delete;
  BoxDoor& operator=(const BoxDoor&) = delete;

 private:
  void serve();
  void answer(const Fd& asking) noexcept;

  BoxHandover given_;
  Fd stop_;  // eventfd
  std::thread thread_;
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_BOX_KEY_REGISTRY_HPP_
