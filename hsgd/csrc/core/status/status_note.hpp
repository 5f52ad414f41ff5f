// What one rank says of itself in one communicator, for `hsgd status`.
//
// Owns one record of the process's page, for as long as the communicator lives, and all that is
// written there. A call costs some fifteen stores into one line and one look at a coarse clock,
// and nobody waits for readers. One thread writes at a time. Never reads what it wrote for another
// purpose.
#ifndef HSGD_CORE_STATUS_STATUS_NOTE_HPP_
#define HSGD_CORE_STATUS_STATUS_NOTE_HPP_

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/call_signature.hpp"
#include "core/base/error.hpp"
#include "core/status/status_page.hpp"

namespace hsgd {

// Where the rank stands; see Place.
struct StatusPlace {
  int rank, size;
  int local_rank, local_size;
  int node, nodes;
};

class StatusNote {
 public:
  // `page` may be nullptr: then nothing is said. `path`: where the ranks of the node meet.
  StatusNote(std::shared_ptr<StatusPage> page, const StatusPlace& place, const std::string& path);
  ~StatusNote();
  StatusNote(const StatusNote&) = delete;
  StatusNote& operator=(const StatusNote&) = delete;

  // The set-up is over. `id`: the same on all ranks.
  void open(uint64_t id);
  void begin_call(uint64_t sequence, const Signature& signature, uint64_t bytes,
                  const hsgd_label* label);
  void end_call(bool well);
  // This rank waits, and has just looked at the others. Either may be -1.
  void look(int awaited, int awaited_node);
  // `is_first`: of the ranks of its node.
  void fail(const Error& error, bool is_first);
  // Hosts of all nodes, separated by commas; one process of each node says them.
  void tell_hosts(const std::string& names);

 private:
  std::shared_ptr<StatusPage> page_;
  StatusRecord* taken_;  // nullptr: there is none, and what is written goes to `unread_`
  StatusRecord unread_{};
  StatusRecord& record_;
};

// A number for texts and words that all ranks know, FNV-1a; never 0.
HSGD_API uint64_t status_id(const void* data, size_t bytes);

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_NOTE_HPP_
