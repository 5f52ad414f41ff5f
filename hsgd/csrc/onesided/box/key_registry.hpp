// The door of a parameter box: under its key, whoever holds it hands it to whoever asks.
//
// Owns the listening socket and a thread that answers. The name is abstract, "@hsgd-box-UID-KEY",
// and belongs to the network namespace. Every holder has a descriptor of the same socket, so the
// name lives exactly as long as one of them does, no matter which, and no other box can take it
// meanwhile. Never maps memory.
#ifndef HSGD_ONESIDED_BOX_KEY_REGISTRY_HPP_
#define HSGD_ONESIDED_BOX_KEY_REGISTRY_HPP_

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"

namespace hsgd {

// What a holder gives away.
struct BoxHandover {
  Fd segment;
  Fd door;  // the listening socket
  size_t bytes = 0;
};

// Claims the key. Throws HSGD_ERR_ARGUMENT when a box has it, or it cannot be one.
Fd claim_box_key(const std::string& key);
// Blocking: what a holder of the key's box gives. Throws HSGD_ERR_TIMEOUT, saying whether nobody
// has the key or its holders do not answer.
BoxHandover ask_for_box(const std::string& key, const Deadline& deadline);

class BoxDoor {
 public:
  // Starts the thread, which hands out duplicates of the descriptors.
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
