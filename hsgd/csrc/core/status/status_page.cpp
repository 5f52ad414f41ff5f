// Makes the file and hands out its records.
#include "core/status/status_page.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

namespace hsgd {
namespace {

// Readers search for this name; it differs from the name of memory that ranks share.
constexpr char kName[] = "status-of-hsgd";
// Address range; pages are allocated as records are taken and hosts are added.
constexpr size_t kRecordsBytes = 256 << 10;
constexpr uint32_t kMostHosts = 4096;
constexpr size_t kBytes = kRecordsBytes + kMostHosts * kHostBytes;
constexpr size_t kPage = 4096;  // bytes allocated at a time
constexpr uint32_t kCapacity = kRecordsBytes / sizeof(StatusRecord) - 1;

}  // namespace

StatusPage::StatusPage(Segment segment) : segment_(std::move(segment)), allocated_bytes_(kPage) {
  StatusHeader& own = *new (segment_.data()) StatusHeader{};
  own.record_bytes = sizeof(StatusRecord);
  own.pid = static_cast<uint32_t>(::getpid());
  own.capacity = kCapacity;
  own.hosts_begin = kRecordsBytes;
  own.version = kStatusVersion;
  // Partner: a reader in another process. A reader that sees the magic sees the rest of the header.
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(own.magic, kStatusMagic, sizeof own.magic);
}

std::shared_ptr<StatusPage> StatusPage::make() {
  try {
    Fd file(::memfd_create(kName, MFD_CLOEXEC));
    if (!file.valid() || ::ftruncate(file.get(), kBytes) != 0) return nullptr;
    allocate_pages(file.get(), 0, kPage);
    return std::shared_ptr<StatusPage>(
        new StatusPage(Segment::attach_empty(std::move(file), kBytes)));
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool StatusPage::is_mine() const { return header().pid == static_cast<uint32_t>(::getpid()); }

StatusRecord* StatusPage::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!free_.empty()) {
    StatusRecord* record = free_.back();
    free_.pop_back();
    return record;
  }
  const uint32_t used = header().used.load(std::memory_order_relaxed);
  const size_t begin = (used + size_t{1}) * sizeof(StatusRecord);
  try {
    if (used == kCapacity) throw std::bad_alloc();
    while (allocated_bytes_ < begin + sizeof(StatusRecord)) {
      allocate_pages(segment_.fd(), allocated_bytes_, kPage);
      allocated_bytes_ += kPage;
    }
    free_.reserve(used + size_t{1});  // so that giving back needs no memory
  } catch (const std::exception&) {
    ++header().without;
    return nullptr;
  }
  auto* record = new (segment_.data() + begin) StatusRecord{};
  // Partner: a reader in another process. A reader that sees a record as used sees its memory.
  header().used.store(used + 1, std::memory_order_release);
  return record;
}

void StatusPage::give_back(StatusRecord* record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(record);
}

void StatusPage::add_hosts(const std::vector<std::string>& names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    for (const std::string& name : names) add_host(name);
  } catch (const std::exception&) {  // out of memory: the missing hosts have no names
  }
}

void StatusPage::add_host(const std::string& name) {
  const uint32_t count = header().hosts.load(std::memory_order_relaxed);
  if (name.empty() || name.size() >= kHostBytes || count == kMostHosts) return;
  if (!hosts_.insert(name).second) return;
  const size_t begin = count * kHostBytes;
  if (allocated_hosts_bytes_ < begin + kHostBytes) {
    allocate_pages(segment_.fd(), kRecordsBytes + allocated_hosts_bytes_, kPage);
    allocated_hosts_bytes_ += kPage;
  }
  std::memcpy(segment_.data() + kRecordsBytes + begin, name.c_str(), name.size() + 1);
  // Partner: a reader in another process. A reader that sees the count sees the name.
  header().hosts.store(count + 1, std::memory_order_release);
}

std::shared_ptr<StatusPage> StatusPages::get() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<StatusPage> page = page_.lock();
  if (page == nullptr || !page->is_mine()) page_ = page = StatusPage::make();
  return page;
}

}  // namespace hsgd
