// StatusNote: writes the state of one rank in one communicator, for `hsgd status`.
//
// Owns one record of the process's page, for as long as the communicator lives. A call costs about
// fifteen stores into one cache line and one read of a coarse clock, and never waits for readers.
// One thread writes at a time.
#ifndef HSGD_CORE_STATUS_STATUS_NOTE_HPP_
#define HSGD_CORE_STATUS_STATUS_NOTE_HPP_

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/call_signature.hpp"
#include "core/base/error.hpp"
#include "core/status/status_page.hpp"

namespace hsgd {

// Position of the rank; see Place.
struct StatusPlace {
  int rank, size;
  int local_rank, local_size;
  int node, nodes;
};

class StatusNote {
 public:
  // `page` may be nullptr: then nothing is written. `path`: where the ranks of the node meet.
  StatusNote(std::shared_ptr<StatusPage> page, const StatusPlace& place, const std::string& path);
  ~StatusNote();
  StatusNote(const StatusNote&) = delete;
  StatusNote& operator=(const StatusNote&) = delete;

  // Marks the end of the set-up. `id`: the same on all ranks.
  void open(uint64_t id);
  void begin_call(uint64_t sequence, const Signature& signature, uint64_t bytes,
                  const hsgd_label* label);
  void end_call(bool well);
  // Notes that this rank waits and has just looked at the others. Either argument may be -1.
  void look(int awaited, int awaited_node);
  // Notes the error that broke the communicator, and the rank that it is about. `is_first`: on this
  // node, this rank failed first.
  void fail(const Error& error, int about, bool is_first);
  // Adds the hosts of all nodes, separated by commas; one process of each node calls this.
  void tell_hosts(const std::string& names);

 private:
  std::shared_ptr<StatusPage> page_;
  StatusRecord* taken_;  // nullptr: no record was free; writes go to `unread_`
  StatusRecord unread_{};
  StatusRecord& record_;
};

// Returns an FNV-1a hash of data that all ranks know; never 0.
HSGD_API uint64_t status_id(const void* data, size_t bytes);

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_NOTE_HPP_
