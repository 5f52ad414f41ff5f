// The meeting's host thread, and its guests.
#include "meeting.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "channels.hpp"

namespace simnccl {
namespace {

constexpr int kBacklog = 64;
constexpr size_t kUuidBytes = 16;

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

struct Hello {
  int32_t rank;
  int32_t size;
  char uuid[kUuidBytes];
};

struct Answer {
  int32_t result;
  int32_t other;  // the rank with the same GPU
};

struct Guest {
  Fd socket;
  Hello hello;
};

// The address of a name that has a zero byte first; its length goes by the name's.
socklen_t address_of(const std::string& name, sockaddr_un* address) {
  *address = sockaddr_un{};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Fd new_socket() { return Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)); }

void send_answer(int socket, const Answer& answer, int fd) {
  iovec part{const_cast<Answer*>(&answer), sizeof answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

// False: the host is gone.
bool receive_answer(int socket, Answer* answer, int* fd) {
  iovec part{answer, sizeof *answer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof *fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != sizeof *answer || header == nullptr) return false;
  std::memcpy(fd, CMSG_DATA(header), sizeof *fd);
  return true;
}

// As NCCL reads it, from 2.30 on.
bool may_share() {
  const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

// Ranks that share a GPU, and may not, are told so; the others, that one of their peers failed.
Answer answer_for(const Guest& guest, const std::vector<Guest>& all) {
  bool duplicates = false;
  for (const Guest& one : all) {
    if (one.hello.size != guest.hello.size) return {ncclInvalidArgument, -1};
    for (const Guest& other : all) {
      if (&one == &other) continue;
      if (one.hello.rank == other.hello.rank) return {ncclInvalidArgument, -1};
      if (may_share() || std::memcmp(one.hello.uuid, other.hello.uuid, kUuidBytes) != 0) continue;
      duplicates = true;
      if (&one == &guest) return {ncclInvalidUsage, other.hello.rank};
    }
  }
  return {duplicates ? ncclRemoteError : ncclSuccess, -1};
}

// All are there, or two disagree about how many that are.
bool complete(const std::vector<Guest>& guests) {
  if (guests.empty()) return false;
  const int size = guests.front().hello.size;
  return guests.back().hello.size != size || guests.size() == static_cast<size_t>(size);
}

// Stops listening before anybody is answered: whoever comes later is told that it is too late.
void host(Fd listener) {
  std::vector<Guest> guests;
  while (!complete(guests)) {
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    if (socket.get() >= 0 && ::recv(socket.get(), &hello, sizeof hello, 0) == sizeof hello)
      guests.push_back(Guest{std::move(socket), hello});
  }
  ::close(listener.release());
  const Fd memory(::memfd_create("simnccl", MFD_CLOEXEC));
  const auto bytes = static_cast<off_t>(region_bytes(static_cast<int>(guests.size())));
  if (memory.get() < 0 || ::ftruncate(memory.get(), bytes) != 0) return;
  for (const Guest& guest : guests) {
    send_answer(guest.socket.get(), answer_for(guest, guests), memory.get());
  }
}

std::string why(const Answer& answer, int rank) {
  char text[128];
  switch (answer.result) {
    case ncclInvalidUsage:
      std::snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d", rank,
                    answer.other);
      return text;
    case ncclRemoteError:
      return "other ranks have the same GPU";
    case ncclInvalidArgument:
      return "the ranks disagree about their number, or two have the same rank";
    default:
      return "";
  }
}

}  // namespace

bool open_meeting(ncclUniqueId* id) {
  unsigned char random[16];
  if (::getrandom(random, sizeof random, 0) != sizeof random) return false;
  std::string name = "simnccl-";
  for (const unsigned char byte : random) {
    name += "0123456789abcdef"[byte / 16];
    name += "0123456789abcdef"[byte % 16];
  }
  Fd listener = new_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return false;
  if (::listen(listener.get(), kBacklog) != 0) return false;
  *id = ncclUniqueId{};
  std::memcpy(id->internal, name.data(), name.size());
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(host, std::move(listener)).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return true;
}

Meeting join_meeting(const ncclUniqueId& id, int rank, int size, const std::string& uuid) {
  const std::string name(id.internal, ::strnlen(id.internal, 64));
  const Fd socket = new_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
    return {ncclSystemError, "nobody listens for this id: it was used, or its maker is gone", -1};
  Hello hello{rank, size, {}};
  std::memcpy(hello.uuid, uuid.data(), kUuidBytes);
  Answer answer{};
  int fd = -1;
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello ||
      !receive_answer(socket.get(), &answer, &fd))
    return {ncclRemoteError, "the maker of the id is gone", -1};
  Fd memory(fd);
  if (answer.result != ncclSuccess)
    return {static_cast<ncclResult_t>(answer.result), why(answer, rank), -1};
  return {ncclSuccess, "", memory.release()};
}

}  // namespace simnccl
