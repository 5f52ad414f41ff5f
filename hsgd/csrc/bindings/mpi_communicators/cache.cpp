// Caches one core communicator per MPI communicator, created when first needed, for the interposer.
//
// Owns the only globals of the native code, except those that MPI keeps for us (see UntilFinalize)
// and the turns of network/mpi/threads.cpp: an attribute key, so that MPI itself calls the clean-up
// when a communicator is freed; and the last lookup of each thread, because asking MPI takes its
// locks. Calls PMPI_* only.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/c/handles.hpp"
#include "bindings/mpi_communicators/comm.hpp"
#include "core/base/status.hpp"
#include "hsgd_mpi.h"
#include "network/mpi/handle.hpp"
#include "network/mpi/leave_notices.hpp"

namespace hsgd {
namespace {

void add(const hsgd_counters& from, hsgd_counters* to) {
  to->calls += from.calls;
  to->payload_bytes += from.payload_bytes;
  to->intra_bytes += from.intra_bytes;
  to->inter_bytes_sent += from.inter_bytes_sent;
  to->inter_bytes_received += from.inter_bytes_received;
  to->wait_ns += from.wait_ns;
  to->total_ns += from.total_ns;
}

class Cache;

// The attribute of an MPI communicator.
struct Entry {
  hsgd_comm* comm = nullptr;  // nullptr: this communicator uses MPI, at least so far
  Cache* cache = nullptr;     // nullptr until decided, and after the cache is destroyed
  uint64_t worth_ns = 0;      // time worth of the calls that wanted `comm`, the same on all ranks
  bool decided = false;
};

// All entries of this process. In MPI_Finalize the entries of existing communicators stay, empty.
class Cache {
 public:
  Cache() { expect_lines(); }
  ~Cache() {
    for (Entry* entry : live_) {
      entry->cache = nullptr;
      hsgd_comm_destroy(std::exchange(entry->comm, nullptr));
    }
  }

  void enter(Entry* entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_.push_back(entry);
    entry->cache = this;
  }

  void leave(Entry* entry) {
    const std::lock_guard<std::mutex> leaving(leaving_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      live_.erase(std::remove(live_.begin(), live_.end(), entry), live_.end());
      if (entry->comm != nullptr) add(entry->comm->communicator->counters(), &past_);
    }
    hsgd_comm_destroy(std::exchange(entry->comm, nullptr));
  }

  // Returns the measurements of these ranks from their first communicator, as this rank saw them.
  KnownTuning known(const std::vector<int>& ranks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tunings_.find(ranks);
    if (found == tunings_.end()) return {};
    const hsgd_topology& tuning = found->second;
    KnownTuning known;
    known.store = tuning.nontemporal != 0 ? 2 : 1;
    if (tuning.node_count > 1) return known;
    known.oneshot_bytes = static_cast<int64_t>(tuning.oneshot_bytes);
    known.chunk_bytes = static_cast<int64_t>(tuning.chunk_bytes);
    known.allreduce_bytes = tuning.allreduce_bytes;
    return known;
  }

  void learn(std::vector<int> ranks, const hsgd_comm* comm) {
    hsgd_topology tuning;
    hsgd_comm_topology(comm, &tuning);
    const std::lock_guard<std::mutex> lock(mutex_);
    tunings_.emplace(std::move(ranks), tuning);
  }

  hsgd_counters counters() {
    // No entry may leave meanwhile, but others may enter: reading a communicator's counters waits
    // for its running collective, and a peer may create a communicator before it joins that
    // collective.
    const std::lock_guard<std::mutex> leaving(leaving_);
    std::vector<Entry*> live;
    hsgd_counters sum;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      live = live_;
      sum = past_;
    }
    for (const Entry* entry : live) {
      if (entry->comm != nullptr) add(entry->comm->communicator->counters(), &sum);
    }
    return sum;
  }

 private:
  std::mutex leaving_;  // taken before mutex_
  std::mutex mutex_;
  std::vector<Entry*> live_;  // owned by the attributes
  hsgd_counters past_{};
  std::map<std::vector<int>, hsgd_topology> tunings_;  // by ranks of MPI_COMM_WORLD
};

// Counts added and removed entries: a communicator may get one, and a handle may be reused for
// another communicator. The program orders the thread that frees or uses a communicator before the
// one that then uses the same handle, so this counter needs no order of its own.
std::atomic<uint64_t> entry_changes{0};

void note_change() { entry_changes.fetch_add(1, std::memory_order_relaxed); }

// The last lookup of this thread.
struct LastFound {
  MPI_Comm comm;
  uint64_t changes;  // value at the lookup; 0: never
  Entry* entry;      // nullptr: there was none
};
thread_local LastFound last_found{};

int delete_entry(MPI_Comm, int, void* attribute, void*) {
  const std::unique_ptr<Entry> entry(static_cast<Entry*>(attribute));
  note_change();
  if (entry->cache != nullptr) entry->cache->leave(entry.get());
  return MPI_SUCCESS;
}

// Returns the attribute key, which lives as long as MPI. The first caller creates it; MPI must be
// running. A copy of a communicator starts without an entry.
int entry_key() {
  static const int created = [] {
    int key = MPI_KEYVAL_INVALID;
    check_mpi(PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_entry, &key, nullptr),
              "MPI_Comm_create_keyval");
    note_change();
    return key;
  }();
  return created;
}

Entry* find_entry(MPI_Comm comm) {
  const uint64_t changes = entry_changes.load(std::memory_order_relaxed);
  LastFound& last = last_found;
  if (last.changes == changes && changes > 0 && last.comm == comm) return last.entry;
  Entry* entry = nullptr;
  int found = 0;
  check_mpi(PMPI_Comm_get_attr(comm, entry_key(), &entry, &found), "MPI_Comm_get_attr");
  if (found == 0) entry = nullptr;
  last = {comm, changes, entry};
  return entry;
}

// Returns the ranks in MPI_COMM_WORLD, in the order of `comm`; MPI_UNDEFINED for spawned processes.
std::vector<int> world_ranks(MPI_Comm comm) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group part = MPI_GROUP_NULL;
  int size = 0;
  check_mpi(PMPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check_mpi(PMPI_Comm_group(comm, &part), "MPI_Comm_group");
  check_mpi(PMPI_Group_size(part, &size), "MPI_Group_size");
  std::vector<int> own(static_cast<size_t>(size));
  std::vector<int> ranks(own.size());
  std::iota(own.begin(), own.end(), 0);
  check_mpi(PMPI_Group_translate_ranks(part, size, own.data(), all, ranks.data()),
            "MPI_Group_translate_ranks");
  PMPI_Group_free(&part);
  PMPI_Group_free(&all);
  return ranks;
}

// Creates a communicator with the known measurements. The ranks measure only for their first one,
// which takes most of the time.
hsgd_comm* create_as_known(MPI_Comm comm, const hsgd_options& options, Cache* cache) {
  std::vector<int> ranks = world_ranks(comm);
  const bool spawned = std::count(ranks.begin(), ranks.end(), MPI_UNDEFINED) > 0;
  const KnownTuning known = spawned ? KnownTuning{} : cache->known(ranks);
  hsgd_comm* created = create_over(comm, options, Wanted::kBehindMpi, known);
  if (created != nullptr && !spawned && known.store == 0) cache->learn(std::move(ranks), created);
  return created;
}

hsgd_comm* create_unless_pointless(MPI_Comm comm, const hsgd_options& options, Cache* cache) {
  int size = 0;
  int rank = 0;
  int inter = 0;
  check_mpi(PMPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  check_mpi(PMPI_Comm_size(comm, &size), "MPI_Comm_size");
  check_mpi(PMPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  if (inter != 0 || size == 1) return nullptr;
  try {
    return create_as_known(comm, options, cache);
  } catch (const AgreedError& error) {
    if (rank == 0) {
      std::fprintf(stderr, "hsgd: warning: %s; this communicator of %d ranks stays with MPI\n",
                   error.what(), size);
    }
    return nullptr;
  }
}

Entry* make_entry(MPI_Comm comm) {
  auto entry = std::make_unique<Entry>();
  check_mpi(PMPI_Comm_set_attr(comm, entry_key(), entry.get()), "MPI_Comm_set_attr");
  note_change();
  return entry.release();
}

// Adds `worth_ns` to the entry; returns true if the sum reaches the price.
bool is_paid(MPI_Comm comm, Entry* entry, uint64_t worth_ns, uint64_t price_ns) {
  int ranks = 0;
  check_mpi(PMPI_Comm_size(comm, &ranks), "MPI_Comm_size");
  entry->worth_ns += worth_ns;
  return entry->worth_ns >= price_ns * static_cast<uint64_t>(ranks);
}

hsgd_comm* find_or_create(MPI_Comm comm, const hsgd_options& options, uint64_t worth_ns,
                          uint64_t price_ns) {
  Entry* entry = find_entry(comm);
  if (entry != nullptr && entry->decided) return entry->comm;
  Cache* cache = UntilFinalize<Cache>::get();
  if (cache == nullptr) return nullptr;  // MPI_Finalize has begun
  if (entry == nullptr) entry = make_entry(comm);
  if (!is_paid(comm, entry, worth_ns, price_ns)) return nullptr;
  entry->comm = create_unless_pointless(comm, options, cache);
  entry->decided = true;
  cache->enter(entry);
  return entry->comm;
}

}  // namespace
}  // namespace hsgd

int hsgd_mpi_comm_cached(const void* mpi_comm, const hsgd_options* options, uint64_t worth_ns,
                         uint64_t price_ns, hsgd_comm** comm, hsgd_error* err) {
  return hsgd::guarded(err, [&] {
    *comm = nullptr;
    *comm =
        hsgd::find_or_create(*static_cast<const MPI_Comm*>(mpi_comm), *options, worth_ns, price_ns);
  });
}

hsgd_comm* hsgd_mpi_comm_known(const void* mpi_comm) {
  hsgd_comm* comm = nullptr;
  hsgd::guarded(nullptr, [&] {
    const hsgd::Entry* entry = hsgd::find_entry(*static_cast<const MPI_Comm*>(mpi_comm));
    if (entry != nullptr) comm = entry->comm;
  });
  return comm;
}

void hsgd_mpi_cached_counters(hsgd_counters* counters) {
  *counters = hsgd_counters{};
  hsgd::guarded(nullptr, [&] {
    if (!hsgd::mpi_is_running()) return;
    hsgd::Cache* cache = hsgd::UntilFinalize<hsgd::Cache>::get();
    if (cache != nullptr) *counters = cache->counters();
  });
}
