// Binds and publishes the sockets at which ranks meet.
#include "node/rendezvous/listener.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "core/base/error.hpp"
#include "core/os/wait.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

void bind_socket(const Fd& socket, const std::string& name) {
  const Address address = address_of(name);
  const auto* to = reinterpret_cast<const sockaddr*>(&address.name);
  if (::bind(socket.get(), to, address.bytes) != 0) {
    fail_system(("set-up: listening at " + name).c_str());
  }
}

// Returns an unused name in the folder of `path`, cut to the size of an address.
std::string name_beside(const std::string& path) {
  constexpr size_t kShortest = 3;
  uint32_t word = 0;
  draw_random(&word, sizeof word);
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  const size_t room = sizeof(sockaddr_un::sun_path) - 1 - folder.size();
  return folder + text(".%08x", word).substr(0, std::max(kShortest, room));
}

// Gives a listening socket another name; returns false if that name is taken.
bool give_name(const std::string& hidden, const std::string& name) {
  if (::link(hidden.c_str(), name.c_str()) == 0) return true;
#ifdef SYS_renameat2
  constexpr unsigned kNoReplace = 1;
  if (errno != EEXIST) {  // a file system without hard links
    const long status =
        ::syscall(SYS_renameat2, AT_FDCWD, hidden.c_str(), AT_FDCWD, name.c_str(), kNoReplace);
    if (status == 0) return true;
  }
#endif
  if (errno != EEXIST) fail_system(("set-up: listening at " + name).c_str());
  return false;
}

[[noreturn]] void fail_in_use(const std::string& name) {
  throw_error(HSGD_ERR_ARGUMENT, 0,
              "set-up at %s: another job is using this path; give each job its own", name.c_str());
}

// Throws if a process listens at `path`; the text names `name`.
void check_unused(const std::string& path, const std::string& name) {
  const Listening found = who_listens(path);
  if (found.who == Listening::Who::kNobody) return;
  if (found.who != Listening::Who::kStranger) fail_in_use(name);
  throw_error(HSGD_ERR_ARGUMENT, 0,
              "set-up at %s: a process of another user (uid %u, pid %d) listens there; give "
              "the job a name that cannot be guessed",
              name.c_str(), found.peer.user, found.peer.pid);
}

// A lock held while a stale socket is removed, so that no process removes what another job has just
// put in its place. Best effort: any process that can read the folder can hold it.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    folder_ = Fd(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    constexpr int kTries = 100;
    for (int tries = 0; folder_.valid() && tries < kTries; ++tries) {
      if (::flock(folder_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
      pause_ms(10);
    }
  }

 private:
  Fd folder_;
};

// Removes the file at `path` if no process listens there: a job that was killed during its set-up
// left it. If a process listens after all, in spite of the lock, the file is put back; ranks that
// come in between try again.
void clear_stale(const std::string& path) {
  const FolderLock lock(path);
  struct stat found{};
  if (::lstat(path.c_str(), &found) != 0) return;  // already gone
  if (!S_ISSOCK(found.st_mode)) {
    throw_error(HSGD_ERR_ARGUMENT, 0,
                "set-up at %s: the file there is not a socket; give another path", path.c_str());
  }
  check_unused(path, path);
  const std::string aside = name_beside(path);
  if (::rename(path.c_str(), aside.c_str()) != 0) {
    if (errno == ENOENT) return;
    fail_system(("set-up: replacing " + path).c_str());
  }
  try {
    check_unused(aside, path);
  } catch (const Error&) {
    static_cast<void>(give_name(aside, path));
    ::unlink(aside.c_str());
    throw;
  }
  ::unlink(aside.c_str());
}

}  // namespace

MeetingPoint meeting_point_of(const std::string& path) {
  constexpr size_t kSecretBytes = 2 * MeetingPoint::kProofBytes;
  const size_t mark = path.size() - kSecretBytes - 1;
  if (path[0] != '@' || path.size() < kSecretBytes + 3 || path[mark] != '#' ||
      path.find_first_not_of("0123456789abcdef", mark + 1) != std::string::npos) {
    return {path, ""};
  }
  return {path.substr(0, mark), path.substr(mark + 1)};
}

MeetingWords draw_meeting_words() {
  MeetingWords words{};
  draw_random(words.data(), sizeof words);
  return words;
}

std::string meeting_path(const MeetingWords& words) {
  const auto word = [&](size_t i) { return static_cast<unsigned long long>(words[i]); };
  return text("@hsgd-%016llx%016llx#%016llx%016llx", word(0), word(1), word(2), word(3));
}

// Binds the socket under another name and gives it the final name only when it listens. So a socket
// under the final name listens, or its process has ended.
Listener::Listener(const std::string& path)
    : name_(meeting_point_of(path).name), fd_(new_socket()) {
  const Address address = address_of(name_);
  if (path[0] == '@') {
    const auto* to = reinterpret_cast<const sockaddr*>(&address.name);
    if (::bind(fd_.get(), to, address.bytes) != 0) {
      if (errno == EADDRINUSE) {
        check_unused(name_, name_);
        fail_in_use(name_);  // bound, but no process listens yet
      }
      fail_system(("set-up: listening at " + name_).c_str());
    }
    if (::listen(fd_.get(), SOMAXCONN) != 0) fail_system("listen");
    return;
  }
  const std::string hidden = name_beside(name_);
  // Linux gives the file the mode of the socket. The umask would apply to all threads of the
  // process.
  if (::fchmod(fd_.get(), S_IRUSR | S_IWUSR) != 0) fail_system("fchmod of a socket");
  bind_socket(fd_, hidden);
  try {
    publish(hidden);
  } catch (...) {
    ::unlink(hidden.c_str());
    throw;
  }
  ::unlink(hidden.c_str());
}

void Listener::publish(const std::string& hidden) {
  struct stat own{};
  if (::lstat(hidden.c_str(), &own) != 0) fail_system("lstat of a socket");
  if (::listen(fd_.get(), SOMAXCONN) != 0) fail_system("listen");
  constexpr int kTries = 100;  // other jobs may publish and end in between
  for (int tries = 0; !give_name(hidden, name_); ++tries) {
    if (tries == kTries) fail_in_use(name_);
    clear_stale(name_);
  }
  device_ = own.st_dev;
  inode_ = own.st_ino;
}

Listener::~Listener() {
  struct stat found{};
  if (inode_ == 0 || ::lstat(name_.c_str(), &found) != 0) return;
  if (found.st_dev == device_ && found.st_ino == inode_) ::unlink(name_.c_str());
}

Listening who_listens(const std::string& path) {
  const Fd socket = new_socket();
  if (try_connect(socket, address_of(meeting_point_of(path).name), 0)) {
    const Peer peer = peer_of(socket);
    return {peer.is_trusted() ? Listening::Who::kTrusted : Listening::Who::kStranger, peer};
  }
  if (errno == EAGAIN) return {Listening::Who::kTrusted, {}};
  const bool nobody = errno == ECONNREFUSED || errno == ENOENT;
  return {nobody ? Listening::Who::kNobody : Listening::Who::kUnknown, {}};
}

bool reachable(const std::string& path) {
  return who_listens(path).who == Listening::Who::kTrusted;
}

}  // namespace hsgd
