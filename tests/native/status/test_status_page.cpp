// The page that a process keeps for `hsgd status`, and the records in it.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/status/status_note.hpp"
#include "core/status/status_page.hpp"
#include "support/check.hpp"

namespace {

using hsgd::NoteState;
using hsgd::StatusNote;
using hsgd::StatusPage;
using hsgd::StatusPages;
using hsgd::StatusRecord;

TEST("a process has one page as long as somebody holds it") {
  StatusPages pages;
  std::shared_ptr<StatusPage> first = pages.get();
  CHECK(first != nullptr && first->is_mine());
  CHECK(pages.get() == first);
  const std::weak_ptr<StatusPage> gone = first;
  first.reset();
  CHECK(gone.expired());
  CHECK(pages.get() != nullptr);
}

TEST("a record that was given back is given out again, and there is an end to them") {
  const std::shared_ptr<StatusPage> page = StatusPage::make();
  std::vector<StatusRecord*> taken;
  while (StatusRecord* record = page->take()) {
    record->sequence = taken.size();
    taken.push_back(record);
  }
  CHECK_EQ(taken.size(), (size_t{256} << 10) / sizeof(StatusRecord) - 1);
  for (size_t i = 0; i < taken.size(); ++i) CHECK_EQ(taken[i]->sequence, i);
  page->give_back(taken[5]);
  CHECK(page->take() == taken[5]);
  CHECK(page->take() == nullptr);
}

TEST("hosts are kept once each, and there is an end to them, too") {
  const std::shared_ptr<StatusPage> page = StatusPage::make();
  StatusRecord* record = page->take();
  page->give_back(record);
  auto* const bytes = reinterpret_cast<const char*>(record) - sizeof(StatusRecord);
  const auto& header = *reinterpret_cast<const hsgd::StatusHeader*>(bytes);
  const auto host = [&](size_t index) {
    return std::string(bytes + header.hosts_begin + index * hsgd::kHostBytes);
  };
  const std::string longest(hsgd::kHostBytes - 1, 'x');
  StatusNote note(page, {0, 2, 0, 1, 0, 2}, "@somewhere");
  note.tell_hosts("node1,node2,node1,," + longest + ",y" + longest);
  note.tell_hosts("node2,node3");
  CHECK_EQ(header.hosts.load(), uint32_t{4});
  for (size_t i = 0; i < 4; ++i)
    CHECK_EQ(host(i), (std::vector<std::string>{"node1", "node2", longest, "node3"}[i]));
  for (int i = 0; i < 5000; ++i) note.tell_hosts("other" + std::to_string(i));
  CHECK_EQ(header.hosts.load(), uint32_t{4096});
  CHECK_EQ(host(4095), std::string("other4091"));
}

TEST("a communicator without a page, or for which it has no room, says nothing") {
  const std::shared_ptr<StatusPage> page = StatusPage::make();
  while (page->take() != nullptr) {
  }
  for (const std::shared_ptr<StatusPage>& none : {page, std::shared_ptr<StatusPage>()}) {
    StatusNote note(none, {0, 1, 0, 1, 0, 1}, "@somewhere");
    note.open(7);
    note.look(0, -1);
    note.end_call(true);
    note.tell_hosts("node1");
  }
}

TEST("a reader sees no part of a change") {
  const std::shared_ptr<StatusPage> page = StatusPage::make();
  StatusRecord* record = page->take();
  page->give_back(record);  // and the note gets it
  StatusNote note(page, {1, 3, 1, 3, 0, 1}, "@somewhere");
  CHECK(record->state == NoteState::kSetUp);
  const uint64_t before = record->version.load();
  note.open(7);
  const hsgd_label label{"a name", nullptr, 0};
  note.begin_call(12, hsgd::Signature::pack(HSGD_BROADCAST, HSGD_UINT8, HSGD_SUM, 0, 9, 0), 9,
                  &label);
  note.look(2, -1);
  CHECK(record->state == NoteState::kOpen);
  CHECK_EQ(record->id, uint64_t{7});
  CHECK_EQ(record->sequence, uint64_t{12});
  CHECK_EQ(uint32_t{record->kind}, uint32_t{HSGD_BROADCAST});
  CHECK_EQ(record->awaited, 2);
  CHECK_EQ(std::string(record->name), "a name");
  CHECK(record->since_ns > 0 && record->looked_ns >= record->since_ns);
  note.end_call(true);
  note.fail(hsgd::Error(HSGD_ERR_PEER_LOST, 2, std::string(1000, 'x')), 2, true);
  CHECK_EQ(record->finished, uint64_t{1});
  CHECK_EQ(record->is_first, 1);
  CHECK_EQ(std::string(record->message), std::string(sizeof record->message - 1, 'x'));
  CHECK_EQ(record->version.load(), before + 10);  // five changes: even again after each
}

TEST("threads take and give back at the same time") {
  const std::shared_ptr<StatusPage> page = StatusPage::make();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&page, thread] {
      for (int turn = 0; turn < 200; ++turn) {
        StatusNote note(page, {thread, 4, thread, 4, 0, 1}, "@somewhere");
        note.open(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
