// Writes a record so that a reader never takes half a change for a whole one.
#include "core/status/status_note.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <sstream>
#include <utility>
#include <vector>

namespace hsgd {
namespace {

// Returns the time of now_ns(), at most some milliseconds late, and several times cheaper.
int64_t coarse_now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A change of the record (a sequence lock). The fence orders the odd version before the change, the
// release orders the change before the even version. So a reader that sees the same even version
// before and after its copy has seen no part of a change.
class Change {
 public:
  explicit Change(StatusRecord& record)
      : version_(record.version), before_(version_.load(std::memory_order_relaxed)) {
    version_.store(before_ + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  ~Change() { version_.store(before_ + 2, std::memory_order_release); }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  std::atomic<uint64_t>& version_;
  uint64_t before_;
};

template <size_t kBytes>
void copy_text(char (&to)[kBytes], const char* from) {
  const size_t bytes = ::strnlen(from, kBytes - 1);
  std::memcpy(to, from, bytes);
  to[bytes] = '\0';
}

}  // namespace

uint64_t status_id(const void* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;
  const auto* byte = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ byte[i]) * 1099511628211u;
  return std::max<uint64_t>(hash, 1);
}

StatusNote::StatusNote(std::shared_ptr<StatusPage> page, const StatusPlace& place,
                       const std::string& path)
    : page_(std::move(page)),
      taken_(page_ == nullptr ? nullptr : page_->take()),
      record_(taken_ == nullptr ? unread_ : *taken_) {
  const Change change(record_);
  record_.state = NoteState::kSetUp;
  record_.id = 0;
  record_.meeting = status_id(path.data(), path.size());
  record_.rank = place.rank;
  record_.size = place.size;
  record_.local_rank = place.local_rank;
  record_.local_size = place.local_size;
  record_.node = place.node;
  record_.nodes = place.nodes;
  record_.sequence = record_.finished = record_.bytes = 0;
  record_.since_ns = coarse_now_ns();
  record_.kind = record_.in_call = record_.named = 0;
  record_.looked_ns = record_.waits_since_ns = 0;
  record_.awaited = record_.awaited_node = record_.error_rank = -1;
  record_.is_first = 0;
  record_.error = HSGD_OK;
  record_.name[0] = record_.message[0] = '\0';
}

StatusNote::~StatusNote() {
  if (taken_ == nullptr || !page_->is_mine()) return;
  {
    const Change change(record_);
    record_.state = NoteState::kFree;
  }
  page_->give_back(taken_);
}

void StatusNote::open(uint64_t id) {
  const Change change(record_);
  record_.state = NoteState::kOpen;
  record_.id = id;
  record_.since_ns = coarse_now_ns();
  record_.looked_ns = record_.waits_since_ns = 0;
}

void StatusNote::begin_call(uint64_t sequence, const Signature& signature, uint64_t bytes,
                            const hsgd_label* label) {
  const bool named = label != nullptr && label->name != nullptr;
  const int64_t now = coarse_now_ns();
  const Change change(record_);
  record_.sequence = sequence;
  record_.bytes = bytes;
  record_.since_ns = now;
  record_.looked_ns = record_.waits_since_ns = 0;
  record_.kind = static_cast<uint8_t>(signature.kind());
  record_.in_call = 1;
  record_.named = named ? 1 : 0;
  if (named) copy_text(record_.name, label->name);
}

void StatusNote::end_call(bool well) {
  const Change change(record_);
  record_.finished += well ? 1 : 0;
  // A call that never looked at the others was short: its start time is kept.
  if (record_.looked_ns != 0) record_.since_ns = coarse_now_ns();
  record_.in_call = 0;
}

void StatusNote::look(int awaited, int awaited_node) {
  const int64_t now = coarse_now_ns();
  const Change change(record_);
  record_.looked_ns = now;
  if (record_.waits_since_ns != 0 && record_.awaited == awaited &&
      record_.awaited_node == awaited_node) {
    return;
  }
  record_.waits_since_ns = now;
  record_.awaited = awaited;
  record_.awaited_node = awaited_node;
}

void StatusNote::fail(const Error& error, int about, bool is_first) {
  const int64_t now = coarse_now_ns();
  const Change change(record_);
  record_.state = NoteState::kBroken;
  record_.since_ns = now;
  record_.error = error.code();
  record_.error_rank = about;
  record_.is_first = is_first ? 1 : 0;
  copy_text(record_.message, error.what());
}

void StatusNote::tell_hosts(const std::string& names) {
  if (taken_ == nullptr || !page_->is_mine()) return;
  std::vector<std::string> each;
  std::istringstream words(names);
  for (std::string name; std::getline(words, name, ',');) each.push_back(name);
  page_->add_hosts(each);
}

}  // namespace hsgd
