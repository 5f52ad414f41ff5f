// engine(): finds the engine and the program's MPI through the dynamic linker.
//
// Holds no lock during dlopen: another thread may call MPI from within the linker, which then holds
// its own lock.
#include "bindings/mpi_preload/engine.hpp"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bindings/mpi_preload/messages.hpp"

namespace hsgd::preload {
namespace {

// MPI's binary interfaces, and the name (DT_SONAME) by which programs ask for a library of each;
// hsgd/base/mpi_abi.py has the same. An engine lies beside this library for each that hsgd was
// built for.
struct Abi {
  char name[8];
  char soname[16];
};
constexpr Abi kAbis[] = {
    {"openmpi", "libmpi.so.40"}, {"mpich", "libmpi.so.12"}, {"mpiabi", "libmpi_abi.so.1"}};
constexpr char kAnyFunction[] = "PMPI_Allreduce";
constexpr int kExitCode = 2;

// The permanent decision of a process: the engine's handle, or nullptr and the reason.
struct Decision {
  void* engine;
  char why[PATH_MAX + 64];
};

constexpr Decision kNoMemory{nullptr, "no memory"};

// Release pairs with acquire: a reader of the decision also sees its text. Never freed.
std::atomic<const Decision*> decided{nullptr};

struct Object {
  size_t left;  // bytes left for the path
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

// Returns the first library of this process that has the function, directly or through its
// dependencies: a libmpi that is not globally visible, because it was loaded with a module
// (mpi4py). It is never closed.
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
  // The last result, to avoid another search; threads that search at once find the same.
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

// Returns DT_SONAME of the library that contains the function; "" if it has none.
const char* soname_of(const void* function) {
  Dl_info info;
  void* found = nullptr;
  if (::dladdr1(function, &info, &found, RTLD_DL_LINKMAP) == 0 || found == nullptr) return "";
  const auto* const map = static_cast<const link_map*>(found);
  ElfW(Addr) strings = 0;
  size_t name = 0;
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
    if (entry->d_tag == DT_SONAME) name = entry->d_un.d_val;
  }
  if (strings < map->l_addr) strings += map->l_addr;  // if the linker has not relocated the table
  return strings != 0 && name != 0 ? reinterpret_cast<const char*>(strings) + name : "";
}

// Returns the family from the library's version text: a vendor's library may have its own name.
const char* family_of_mpi() {
  constexpr size_t kVersionBytes = 16 << 10;  // MPICH's has 8192
  const auto ask = reinterpret_cast<int (*)(char*, int*)>(find_in_mpi("PMPI_Get_library_version"));
  auto* const line = static_cast<char*>(std::calloc(1, kVersionBytes));
  int length = 0;
  const bool known = ask != nullptr && line != nullptr && ask(line, &length) == 0;
  const bool is_open_mpi = known && std::strncmp(line, "Open MPI", 8) == 0;
  std::free(line);
  return is_open_mpi ? "openmpi" : "mpich";
}

// Returns the interface of the MPI that has the function.
const Abi* abi_of(const void* function) {
  const char* const soname = soname_of(function);
  for (const Abi& abi : kAbis) {
    if (std::strcmp(soname, abi.soname) == 0) return &abi;
  }
  const char* const family = family_of_mpi();
  for (const Abi& abi : kAbis) {
    if (std::strcmp(family, abi.name) == 0) return &abi;
  }
  return nullptr;
}

// Writes the engine's path, in the directory of this library.
void write_path(const Abi& abi, char (&path)[PATH_MAX]) {
  const char* const own = file_of(&decided);
  const char* const slash = std::strrchr(own, '/');
  const int folder = slash != nullptr ? static_cast<int>(slash + 1 - own) : 0;
  std::snprintf(path, sizeof path, "%.*slibhsgd_pmpi_%s.so", folder, own, abi.name);
}

// Opens the engine for the program's MPI; if none is loaded so far, the first engine whose own MPI
// loads. Writes the reason of a failure into the decision: the linker forgets its message at its
// next call.
void* open_any_engine(const Abi* wanted, char (&path)[PATH_MAX], Decision* decision) {
  for (const Abi& abi : kAbis) {
    if (wanted != nullptr && &abi != wanted) continue;
    write_path(abi, path);
    if (::access(path, F_OK) != 0) continue;
    if (void* const opened = ::dlopen(path, RTLD_NOW | RTLD_LOCAL)) return opened;
    if (decision->why[0] == '\0') refuse(decision, "%s", ::dlerror());
  }
  return nullptr;
}

void* open_engine(Decision* decision) {
  char path[PATH_MAX];
  const void* const theirs = find_in_mpi(kAnyFunction);  // nullptr: no MPI is loaded so far
  const Abi* const abi = theirs != nullptr ? abi_of(theirs) : nullptr;
  void* const opened = open_any_engine(abi, path, decision);
  if (opened == nullptr && decision->why[0] != '\0') return nullptr;
  if (opened == nullptr) {
    return refuse(decision, "%s is missing, which the MPI of this program (%s) needs", path,
                  theirs != nullptr ? file_of(theirs) : "none so far");
  }
  const auto attach =
      reinterpret_cast<void (*)(std::atomic<bool>*)>(::dlsym(opened, "hsgd_pmpi_attach"));
  if (attach == nullptr) return refuse(decision, "%s is of another version of hsgd", path);
  // The engine, too, uses globally visible libraries first, then its own dependencies.
  const void* ours = ::dlsym(RTLD_DEFAULT, kAnyFunction);
  if (ours == nullptr) ours = ::dlsym(opened, kAnyFunction);
  if (theirs != nullptr && ours != theirs) {  // stays loaded: it may be unsafe to unload it
    return refuse(decision, "this program runs the MPI of %s, and hsgd was built for that of %s",
                  file_of(theirs), file_of(ours));
  }
  attach(&messages_noted);
  return opened;
}

// Returns the decision. Threads may call it at once: each loads the engine, which the linker
// counts, and the first one decides.
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
  // The thread that sets it prints the warning; it orders nothing else.
  static std::atomic<bool> has_warned{false};
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
               "hsgd: error: no library of this process has %s, which its MPI_* function must "
               "call; start the program without the interposer "
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
