/* What no allreduce can beat on this machine: the same bytes moved without an algorithm.
 *
 * Owns four plain loops: a ping-pong of cache lines, the least loads and stores of a staged
 * allreduce, those of one whose buffers are shared, and full-duplex TCP between nodes. None gives a
 * result.
 */
#include <errno.h>
#include <fcntl.h>
#ifdef __SSE__
#include <immintrin.h>
#endif
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "worker.h"

enum {
  kChunk = 32768,
  kSlots = 4
}; /* floats per step of the staged loop, steps until it recycles */
enum { kLineBytes = 64, kBoxLines = 16 };
enum { kSpins = 100000, kMaxRanks = 256, kStallMs = 60000 };

/* ---- ping-pong: one call is one transfer, from the rank whose turn it is to the next ---- */

static MPI_Win window;
static char* boxes; /* of all ranks, kBoxLines each */
static uint32_t turn;

static int line_start(Bench* b, const char* word, FILE* facts) {
  const MPI_Aint bytes = b->rank ? 0 : (MPI_Aint)(b->size + 1) * kBoxLines * kLineBytes;
  MPI_Aint size;
  int unit;
  char *mine, *first;
  (void)word, (void)facts;
  PMPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, b->world, &mine, &window);
  PMPI_Win_shared_query(window, 0, &size, &unit, &first);
  boxes = first + (kLineBytes - (uintptr_t)first % kLineBytes) % kLineBytes;
  if (b->rank == 0) memset(first, 0, (size_t)bytes);
  PMPI_Barrier(b->world);
  return 0;
}

static int line_call(Bench* b, int k) {
  const size_t bytes = b->use.count_in * sizeof(float);
  const uint32_t now = ++turn;
  const int from = (int)(now % (uint32_t)b->size), to = (from + 1) % b->size;
  char* box = boxes + (size_t)from * kBoxLines * kLineBytes;
  /* Partner: the other branch. Released after the payload, acquired before it is read. The sender
   * writes again only when the token has come round, so after this receiver has read. */
  _Atomic uint32_t* flag = (_Atomic uint32_t*)(void*)(box + bytes);
  if (b->rank == from) {
    memcpy(box, b->use.in[k], bytes);
    atomic_store_explicit(flag, now, memory_order_release);
  } else if (b->rank == to) {
    for (int spins = 0; atomic_load_explicit(flag, memory_order_acquire) != now; spins++) {
      if (spins > kSpins) sched_yield(); /* far longer than a transfer: the sender has no core */
    }
    memcpy(b->use.out[k], box, bytes);
  }
  return 0;
}

static void line_stop(Bench* b) {
  (void)b;
  PMPI_Win_free(&window);
}

/* ---- memory traffic, with ordinary stores and past the cache ---- */

static float* ring; /* kSlots steps, staged inputs and results */
enum { kRingBytes = sizeof(float) * 2 * kSlots * kChunk };

static int staged_start(Bench* b, const char* word, FILE* facts) {
  (void)b, (void)word, (void)facts;
  if (ring != NULL) return 0;
  ring = bench_allocate(kRingBytes);
  memset(ring, 0, kRingBytes);
  return 0;
}

static void staged_stop(Bench* b) {
  (void)b;
  free(ring);
  ring = NULL;
}

#ifdef __SSE__
enum { kVector = 4 }; /* floats */
static inline void stream(float* to, const float* from) { _mm_stream_ps(to, _mm_loadu_ps(from)); }
#else
enum { kVector = 1 };
static inline void stream(float* to, const float* from) { *to = *from; }
#endif

/* Copies past the cache, or as usual where the target is not aligned for that. */
static void copy_past(float* restrict to, const float* restrict from, size_t n) {
  size_t i = 0;
  if ((uintptr_t)to % (kVector * sizeof(float)) == 0) {
    for (; i + kVector <= n; i += kVector) stream(to + i, from + i);
  }
  for (; i < n; i++) to[i] = from[i];
}

/* out[i] = x[i] + the same element of the `inputs - 1` arrays that follow one another in `more`. */
static void sum(float* restrict out, const float* restrict x, const float* restrict more,
                int inputs, size_t n) {
  if (inputs == 2) {
    for (size_t i = 0; i < n; i++) out[i] = x[i] + more[i];
    return;
  }
  for (size_t i = 0; i < n; i++) {
    float total = x[i];
    for (int r = 1; r < inputs; r++) total += more[(size_t)(r - 1) * n + i];
    out[i] = total;
  }
}

/* What each rank of a staged two-shot allreduce must load and store at least, (5 - 2/ranks) bytes
 * per byte of payload: stage the slices of the others, sum its own slice from `ranks` inputs into
 * the ring and the output, fetch the other results. The ring is this rank's own memory and stays in
 * its cache, so nothing waits and nothing crosses between cores. */
static inline void staged(const Bench* b, int k, int past) {
  size_t slot = 0;
  for (size_t begin = 0; begin < b->use.count_in; begin += kChunk, slot = (slot + 1) % kSlots) {
    const size_t left = b->use.count_in - begin, n = left < kChunk ? left : kChunk;
    const size_t own = n / (size_t)b->size, others = n - own;
    float* restrict inputs = ring + 2 * slot * kChunk;
    float* restrict results = inputs + kChunk;
    const float* restrict x = b->use.in[k] + begin;
    float* restrict y = b->use.out[k] + begin;
    for (size_t i = 0; i < others; i++) inputs[i] = x[own + i];
    if (past) {
      sum(results, x, inputs, b->size, own);
      copy_past(y, results, own);
      copy_past(y + own, inputs, others);
    } else if (b->size == 2) { /* in one pass */
      for (size_t i = 0; i < own; i++) results[i] = y[i] = x[i] + inputs[i];
      for (size_t i = 0; i < others; i++) y[own + i] = inputs[i];
    } else {
      sum(results, x, inputs, b->size, own);
      for (size_t i = 0; i < own; i++) y[i] = results[i];
      for (size_t i = 0; i < others; i++) y[own + i] = inputs[i];
    }
  }
  __asm__ volatile("" ::"r"(ring), "r"(b->use.out[k]) : "memory");
}

static int staged_call(Bench* b, int k) {
  staged(b, k, 0);
  return 0;
}

static int staged_past_call(Bench* b, int k) {
  staged(b, k, 1);
  return 0;
}

/* With all buffers in shared memory each rank reads its slice of `ranks` inputs and writes it to
 * `ranks` outputs: 2 bytes per byte of payload. */
static inline void arena(const Bench* b, int k, int past) {
  enum { kBlock = 1024 }; /* floats, the sum of which stays in the cache */
  const size_t slice = b->use.count_in / (size_t)b->size;
  const float* restrict x = b->use.in[k];
  float* restrict y = b->use.out[k];
  if (b->size == 2 && !past) { /* in one pass */
    for (size_t i = 0; i < slice; i++) y[i] = y[slice + i] = x[i] + x[slice + i];
  }
  for (size_t begin = 0; begin < slice && (past || b->size > 2); begin += kBlock) {
    const size_t n = slice - begin < kBlock ? slice - begin : kBlock;
    for (size_t i = 0; i < n; i++) ring[i] = x[begin + i];
    for (int r = 1; r < b->size; r++) {
      const float* restrict more = x + (size_t)r * slice + begin;
      for (size_t i = 0; i < n; i++) ring[i] += more[i];
    }
    for (int r = 0; r < b->size; r++) {
      float* to = y + (size_t)r * slice + begin;
      if (past) {
        copy_past(to, ring, n);
      } else {
        memcpy(to, ring, n * sizeof(float));
      }
    }
  }
  __asm__ volatile("" ::"r"(ring), "r"(y) : "memory");
}

static int arena_call(Bench* b, int k) {
  arena(b, k, 0);
  return 0;
}

static int arena_past_call(Bench* b, int k) {
  arena(b, k, 1);
  return 0;
}

/* ---- the link: each node's first rank sends to the next node and receives from the one before */

static int nodes, to_next = -1, from_last = -1;

static int fail(Bench* b, const char* what) {
  snprintf(b->why, sizeof b->why, "TCP between nodes: %s: %s", what, strerror(errno));
  return 1;
}

static int connect_to(Bench* b, const char* host, int port) {
  struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
  char service[16];
  snprintf(service, sizeof service, "%d", port);
  if (getaddrinfo(host, service, &hints, &found)) return fail(b, host);
  to_next = socket(AF_INET, SOCK_STREAM, 0);
  const int failed = connect(to_next, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return failed ? fail(b, host) : 0;
}

static int connect_ring(Bench* b, MPI_Comm leaders) {
  struct {
    char host[240];
    int port;
  } here = {{0}, 0}, all[kMaxRanks];
  struct sockaddr_in address = {.sin_family = AF_INET};
  socklen_t length = sizeof address;
  const int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  int rank;
  MPI_Comm_rank(leaders, &rank);
  MPI_Comm_size(leaders, &nodes);
  int failed = listener < 0 || nodes > kMaxRanks ||
               bind(listener, (struct sockaddr*)&address, length) || listen(listener, 1) ||
               getsockname(listener, (struct sockaddr*)&address, &length);
  gethostname(here.host, sizeof here.host - 1);
  here.port = failed ? 0 : ntohs(address.sin_port);
  PMPI_Allgather(&here, sizeof here, MPI_BYTE, all, sizeof here, MPI_BYTE, leaders);
  for (int i = 0; i < nodes; i++) failed |= all[i].port == 0;
  if (failed) return fail(b, "cannot listen");
  const int next = (rank + 1) % nodes;
  failed = connect_to(b, all[next].host, all[next].port);
  PMPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, leaders); /* or accept would wait */
  if (failed) return b->why[0] ? 1 : fail(b, "another node cannot connect");
  from_last = accept(listener, NULL, NULL);
  close(listener);
  if (from_last < 0) return fail(b, "accept");
  setsockopt(to_next, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(to_next, F_SETFL, O_NONBLOCK);
  fcntl(from_last, F_SETFL, O_NONBLOCK);
  return 0;
}

static int link_start(Bench* b, const char* word, FILE* facts) {
  MPI_Comm node, leaders;
  int local, failed = 0;
  (void)word, (void)facts;
  MPI_Comm_split_type(b->world, MPI_COMM_TYPE_SHARED, b->rank, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &local);
  MPI_Comm_split(b->world, local ? MPI_UNDEFINED : 0, b->rank, &leaders);
  if (leaders != MPI_COMM_NULL) {
    failed = connect_ring(b, leaders);
    MPI_Comm_free(&leaders);
  }
  MPI_Comm_free(&node);
  return failed;
}

/* Sends and receives 2 (nodes - 1) / nodes of the bytes: what an allreduce needs at least. */
static int link_call(Bench* b, int k) {
  if (to_next < 0) return 0;
  const size_t limit = b->use.count_in * sizeof(float);
  const size_t total = 2 * limit / (size_t)nodes * (size_t)(nodes - 1);
  size_t sent = 0, received = 0;
  while (sent < total || received < total) {
    struct pollfd wanted[2] = {{sent < total ? to_next : -1, POLLOUT, 0},
                               {received < total ? from_last : -1, POLLIN, 0}};
    if (poll(wanted, 2, kStallMs) <= 0) return fail(b, "stalled");
    for (int i = 0; i < 2; i++) {
      if (!wanted[i].revents) continue;
      size_t* done = i ? &received : &sent;
      const size_t at = *done % limit, left = total - *done;
      const size_t n = left < limit - at ? left : limit - at;
      char* buffer = (char*)(i ? b->use.out[k] : b->use.in[k]) + at;
      const ssize_t moved =
          i ? recv(from_last, buffer, n, 0) : send(to_next, buffer, n, MSG_NOSIGNAL);
      if (moved == 0 || (moved < 0 && errno != EAGAIN)) return fail(b, "broke off");
      if (moved > 0) *done += (size_t)moved;
    }
  }
  return 0;
}

static void link_stop(Bench* b) {
  (void)b;
  if (to_next >= 0) close(to_next);
  if (from_last >= 0) close(from_last);
}

const Contender kLine = {.name = "limit-line",
                         .collectives = 1u << kAllreduce,
                         .unchecked = 1,
                         .start = line_start,
                         .call = line_call,
                         .stop = line_stop};
const Contender kStaged = {.name = "limit",
                           .collectives = 1u << kAllreduce,
                           .unchecked = 1,
                           .start = staged_start,
                           .call = staged_call,
                           .stop = staged_stop};
const Contender kStagedPast = {.name = "limit-past",
                               .collectives = 1u << kAllreduce,
                               .unchecked = 1,
                               .start = staged_start,
                               .call = staged_past_call,
                               .stop = staged_stop};
const Contender kArena = {.name = "limit-arena",
                          .collectives = 1u << kAllreduce,
                          .unchecked = 1,
                          .start = staged_start,
                          .call = arena_call,
                          .stop = staged_stop};
const Contender kArenaPast = {.name = "limit-arena-past",
                              .collectives = 1u << kAllreduce,
                              .unchecked = 1,
                              .start = staged_start,
                              .call = arena_past_call,
                              .stop = staged_stop};
const Contender kLink = {.name = "limit-link",
                         .collectives = 1u << kAllreduce,
                         .unchecked = 1,
                         .start = link_start,
                         .call = link_call,
                         .stop = link_stop};
