// The memory in which a process says what its communicators do, for `hsgd status`.
//
// Owns a small file in memory that stays open while the process has communicators: another process
// of the same user finds it among the descriptors in /proc, by its name, and reads it whatever this
// one does, stopped or hanging. It costs one descriptor and a page of 4 KiB for ten communicators,
// and in one process of each node another one for the names of 64 hosts.
// Never fails a communicator: where there is no memory or descriptor for it, nothing is said.
#ifndef HSGD_CORE_STATUS_STATUS_PAGE_HPP_
#define HSGD_CORE_STATUS_STATUS_PAGE_HPP_

#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "core/status/status_record.hpp"

namespace hsgd {

class StatusPage {
 public:
  // nullptr where it cannot be had.
  static std::shared_ptr<StatusPage> make();

  // A record that is all zero but for its version; nullptr where there is none. From any thread.
  StatusRecord* take();
  void give_back(StatusRecord* record);
  // Hosts of all nodes of a communicator; what is known or too long is left out. From any thread.
  void add_hosts(const std::vector<std::string>& names);
  // False in a forked child, which must not write into it.
  bool is_mine() const;

 private:
  explicit StatusPage(Segment segment);
  StatusHeader& header() const { return *reinterpret_cast<StatusHeader*>(segment_.data()); }
  void add_host(const std::string& name);

  Segment segment_;
  size_t allocated_bytes_;
  size_t allocated_hosts_bytes_ = 0;
  std::mutex mutex_;  // guards what is free, and the header
  std::unordered_set<std::string> hosts_;
  std::vector<StatusRecord*> free_;
};

// The page of a process, which goes with the last of its communicators.
class StatusPages {
 public:
  std::shared_ptr<StatusPage> get();  // nullptr where there is none; from any thread

 private:
  std::mutex mutex_;
  std::weak_ptr<StatusPage> page_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_PAGE_HPP_
