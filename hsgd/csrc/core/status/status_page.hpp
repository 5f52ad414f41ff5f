// StatusPage: memory in which a process publishes the state of its communicators, for `hsgd
// status`.
//
// Owns a small file in memory that stays open while the process has communicators. Another process
// of the same user finds it by name among the descriptors in /proc, and can read it even if this
// process is stopped or hangs. It costs one descriptor and a page of 4 KiB for ten communicators;
// one process of each node has another page for the names of 64 hosts. Never fails a communicator:
// without memory or a descriptor for it, nothing is published.
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
  // Returns nullptr if memory or a descriptor is missing.
  static std::shared_ptr<StatusPage> make();

  // Returns a record that is all zero except its version; nullptr if none is free. Thread-safe.
  StatusRecord* take();
  void give_back(StatusRecord* record);
  // Adds the hosts of all nodes of a communicator, except known and too long names. Thread-safe.
  void add_hosts(const std::vector<std::string>& names);
  // Returns false in a forked child, which must not write into the page.
  bool is_mine() const;

 private:
  explicit StatusPage(Segment segment);
  StatusHeader& header() const { return *reinterpret_cast<StatusHeader*>(segment_.data()); }
  void add_host(const std::string& name);

  Segment segment_;
  size_t allocated_bytes_;
  size_t allocated_hosts_bytes_ = 0;
  std::mutex mutex_;  // guards the free records and the header
  std::unordered_set<std::string> hosts_;
  std::vector<StatusRecord*> free_;
};

// The page of a process; it is freed with the last communicator.
class StatusPages {
 public:
  std::shared_ptr<StatusPage> get();  // nullptr if there is none; thread-safe

 private:
  std::mutex mutex_;
  std::weak_ptr<StatusPage> page_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_PAGE_HPP_
