// Finds the engine and the program's MPI by the dynamic linker's own means.
//
// No lock is held over dlopen: another thread may call MPI from within the linker, which has its
// own lock then.
#include "preload/engine.hpp"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "preload/messages.hpp"

namespace hsgd::preload {
namespace {

constexpr char kFile[] = "libhsgd_pmpi.so";
constexpr char kAnyFunction[] = "PMPI_Allreduce";
constexpr int kExitCode = 2;

// What a process has decided, once and for all: the engine's handle, or nullptr and why.
struct Decision {
  void* engine;
  char why[PATH_MAX + 64];
};

constexpr Decision kNoMemory{nullptr, "no memory"};

// Release pairs with acquire: who sees the decision sees its words. Never freed.
std::atomic<const Decision*> decided{nullptr};

struct Object {
  size_t left;  // in front of it
  char path[PATH_MAX];
};

int copy_path(dl_phdr_info* info, size_t, void* data) {
  auto* const object = static_cast<Object*>(data);
  if (object->left > 0) {
    --object->left;
    return 0;
  }
  std::snprintf(object->path, sizeof object->path, "%s", info->dlpi_name);
  return 1;
}

// The first library of this process in which, or in the needs of which, the function is: a libmpi
// that is not visible for all, because it came with a module (mpi4py). Nobody closes it.
void* library_with(const char* name) {
  for (size_t index = 0;; ++index) {
    Object object;
    object.left = index;
    if (::dl_iterate_phdr(copy_path, &object) == 0) return nullptr;
    void* const library =
        object.path[0] != '\0' ? ::dlopen(object.path, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
    if (library == nullptr) continue;
    if (::dlsym(library, name) != nullptr) return library;
    ::dlclose(library);
  }
}

void* find_in_mpi(const char* name) {
  if (void* const found = ::dlsym(RTLD_DEFAULT, name)) return found;
  // Where the last one was, to look no further; threads that look at once find the same.
  static std::atomic<void*> mpi{nullptr};
  void* library = mpi.load(std::memory_order_relaxed);
  void* const known = library != nullptr ? ::dlsym(library, name) : nullptr;
  if (known != nullptr) return known;
  library = library_with(name);
  mpi.store(library, std::memory_order_relaxed);
  return library != nullptr ? ::dlsym(library, name) : nullptr;
}

const char* file_of(const void* address) {
  Dl_info info;
  return ::dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "nowhere";
}

template <class... Words>
void* refuse(Decision* decision, const char* format, Words... words) {
  std::snprintf(decision->why, sizeof decision->why, format, words...);
  return nullptr;
}

void* open_engine(Decision* decision) {
  const char* const own = file_of(&decided);
  const char* const slash = std::strrchr(own, '/');
  const int folder = slash != nullptr ? static_cast<int>(slash + 1 - own) : 0;
  char path[PATH_MAX];
  std::snprintf(path, sizeof path, "%.*s%s", folder, own, kFile);
  const void* const theirs = find_in_mpi(kAnyFunction);  // nullptr: no MPI here so far
  void* const opened = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* const error = ::dlerror();
    return refuse(decision, "%s", error != nullptr ? error : path);
  }
  const auto attach =
      reinterpret_cast<void (*)(std::atomic<bool>*)>(::dlsym(opened, "hsgd_pmpi_attach"));
  if (attach == nullptr) return refuse(decision, "%s is of another version of hsgd", path);
  // What is visible for all comes first for the engine, too; then what it needs by itself.
  const void* ours = ::dlsym(RTLD_DEFAULT, kAnyFunction);
  if (ours == nullptr) ours = ::dlsym(opened, kAnyFunction);
  if (theirs != nullptr && ours != theirs) {  // it stays loaded, as nobody proves that it may go
    return refuse(decision, "this program runs the MPI of %s, and hsgd was built for that of %s",
                  file_of(theirs), file_of(ours));
  }
  attach(&messages_noted);
  return opened;
}

// Threads may come here at once: each loads, which the linker counts, and the first one decides.
const Decision& decision() {
  const Decision* known = decided.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  auto* const mine = static_cast<Decision*>(std::calloc(1, sizeof(Decision)));
  if (mine == nullptr) return kNoMemory;
  mine->engine = open_engine(mine);
  if (decided.compare_exchange_strong(known, mine, std::memory_order_acq_rel)) return *mine;
  std::free(mine);
  return *known;
}

}  // namespace

void* loaded_engine() {
  const Decision* const known = decided.load(std::memory_order_acquire);
  return known != nullptr ? known->engine : nullptr;
}

void* engine() {
  static std::atomic<bool> has_warned{false};  // who sets this warns; orders nothing else
  const Decision& choice = decision();
  if (choice.engine == nullptr && !has_warned.exchange(true, std::memory_order_relaxed)) {
    std::fprintf(stderr,
                 "hsgd: warning: the interposer does not load: %s; all calls of this process stay "
                 "with MPI; install hsgd again for the MPI and the C++ runtime that are here\n",
                 choice.why);
  }
  return choice.engine;
}

const char* engine_failure() {
  const Decision& choice = decision();
  return choice.engine == nullptr ? choice.why : nullptr;
}

void* of_mpi(const char* name) {
  void* const found = find_in_mpi(name);
  if (found != nullptr) return found;
  std::fprintf(stderr,
               "hsgd: error: no library of this process has %s, to which the call of its MPI_* "
               "function would pass through; start the program without the interposer "
               "(LD_PRELOAD), or install hsgd again for its MPI\n",
               name);
  ::_exit(kExitCode);
}

void* of_engine(const char* name, const char* instead) {
  void* const opened = engine();
  void* const found = opened != nullptr ? ::dlsym(opened, name) : nullptr;
  return found != nullptr ? found : of_mpi(instead);
}

}  // namespace hsgd::preload
