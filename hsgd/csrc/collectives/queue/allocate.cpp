// Communicator::allocate(): memory that all ranks of a node can reach, made on all of them or none.
#include <algorithm>
#include <memory>
#include <optional>

#include "collectives/queue/communicator.hpp"
#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/os/page.hpp"
#include "core/os/shared_memory.hpp"

namespace hsgd {
namespace {

// Reports a death among the ranks of a group that meet again, as soon as a collective would.
class PeerWatch final : public Watch {
 public:
  PeerWatch(const LocalGroup& local, const char* what) : local_(local), what_(what) {}
  void check() override {
    has_spoken_ = true;
    local_.check_peers(LocalGroup::kAnySequence, what_);
    has_spoken_ = false;
  }
  bool has_spoken() const { return has_spoken_; }  // true if the error came from this watch

 private:
  const LocalGroup& local_;
  const char* what_;
  bool has_spoken_ = false;
};

// Returns true if a wait for a peer failed, and nothing of this rank's own.
bool is_of_peer(const Error& error) {
  return error.code() == HSGD_ERR_TIMEOUT || error.code() == HSGD_ERR_PEER_LOST ||
         error.code() == HSGD_ERR_INTERRUPTED;
}

}  // namespace

// Throws on all ranks if `body` throws on one, and names that rank; its node may know the reason
// and throw the same error. Does not ask about the failure of a peer: the ranks would wait again
// for a rank that did not come.
template <class Body>
void Communicator::attempt_on_all(const char* what, Body&& body) {
  std::optional<Error> failure;
  try {
    body();
  } catch (const Error& error) {
    failure = error;
  }
  if (failure && is_of_peer(*failure)) abandon(*failure);
  int32_t failed = 0;
  if (failure) failed = 1 + (failure->rank() >= 0 ? failure->rank() : context_.place().name());
  Operation vote;
  vote.signature = Signature::pack(kAllocate, HSGD_INT32, HSGD_MAX, 0, 1, 0);
  vote.in = vote.out = &failed;
  vote.count = 1;
  vote.reduction = {select_reduce(HSGD_INT32, HSGD_MAX, context_.isa()), context_.copy(),
                    sizeof failed, 1.0};
  run(vote);
  if (failure) throw Error(*failure);
  if (failed != 0) {
    throw_error(HSGD_ERR_MEMORY, failed - 1,
                "%s: rank %d could not get its shared memory; its own error says why", what,
                failed - 1);
  }
}

std::shared_ptr<SharedBuffer> Communicator::allocate(uint64_t count, hsgd_dtype dtype,
                                                     bool once_per_node, const hsgd_label* label) {
  const std::lock_guard<std::mutex> allocating(allocating_);
  Operation agreement;
  agreement.signature =
      Signature::pack(kAllocate, dtype, HSGD_SUM, once_per_node, count, hash_label(label));
  agreement.label = label;
  const char* what = once_per_node ? "shared" : "empty";
  const size_t available = available_memory_bytes();  // all ranks look before any rank allocates
  run(agreement);
  const uint64_t id = ++allocations_;
  // An array of the node consists of equal parts in a row, each allocated by one rank.
  const size_t parts = once_per_node ? static_cast<size_t>(context_.place().local_size) : 1;
  const size_t wanted = std::max<size_t>(1, count * hsgd_dtype_bytes(dtype));
  const size_t each = (wanted + parts - 1) / parts;
  const size_t bytes = parts > 1 ? NodeMemory::pitch(each) : round_up(each, page_bytes());
  std::shared_ptr<SharedBuffer> buffer;
  // Each step succeeds on all ranks or on none, so that no rank waits for a failed one.
  attempt_on_all(what, [&] {
    if (context_.place().local_rank == 0) context_.local().appoint_meeting();
  });
  HSGD_FAULT_POINT("empty: appointed");
  attempt_on_all(what, [&] {
    buffer = share(id, bytes, available, what);
    HSGD_FAULT_POINT("empty: shared");
  });
  if (once_per_node) return buffer;  // collectives treat it as private memory
  const std::lock_guard<std::mutex> lock(mutex_);
  context_.arena().add(buffer);
  return buffer;
}

// Creates and maps the buffer together with all ranks of the node.
std::shared_ptr<SharedBuffer> Communicator::share(uint64_t id, size_t bytes, size_t available,
                                                  const char* what) {
  PeerWatch watch(node(), what);
  try {
    return std::make_shared<SharedBuffer>(
        id, node().rank(), node().names(), bytes, available, node().next_meeting(),
        Deadline(options().timeout_s, options().interrupted, &watch));
  } catch (const Error& error) {
    const bool late = error.code() == HSGD_ERR_TIMEOUT;
    const bool of_peer = late || error.code() == HSGD_ERR_PEER_LOST;
    const int peer = context_.local_rank_of(context_.place().names.rank_of(error.rank()));
    if (!of_peer || peer < 0 || watch.has_spoken()) throw;
    throw Error(error.code(), error.rank(),
                text("%s: ", what) + node().person(peer) +
                    (late ? text(" did not share its memory within %g s; raise "
                                 "HSGD_TIMEOUT_S if this is expected",
                                 options().timeout_s)
                          : " left"));
  }
}

}  // namespace hsgd
