/* One rank of a C job: does what the parent orders, like ../workers/worker.py, whose protocol it
 * speaks.
 *
 * Owns one rank's buffers, the timed loop and the check of the results. Never decides how often or
 * in which order anything is measured: the parent orders, one line each way on a UNIX socket.
 * Between orders the rank sleeps in a read. The numbers that are sent are those of
 * ../harness/pattern.py, the sizes of buffers those of ../harness/operations.py. Compiled by
 * ../harness/jobs.py when a benchmark starts, without hsgd.c where hsgd was not built for the MPI.
 */
#include "worker.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { kMaxBatches = 4096, kRankStep = 7919, kBufferStep = 104729, kRanksThatSumAll = 16 };

static const Contender* const kContenders[] = {
#ifdef WITH_HSGD
    &kHsgd, &kHsgdArena,
#endif
    &kMpi,  &kDeepSpeed, &kOneCcl, &kLine, &kStaged, &kStagedPast, &kArena, &kArenaPast, &kLink};
enum { kContenderCount = sizeof kContenders / sizeof *kContenders };
static const char* const kNames[kCollectives] = {"allreduce",      "broadcast", "allgather",
                                                 "reduce_scatter", "alltoall",  "barrier"};
static int started[kContenderCount];

/* What something took of a clock and of the processor, in seconds. */
typedef struct Spent {
  double wall_s, cpu_s;
} Spent;
static Spent initializing; /* MPI_Init */

/* Of a clock that all processes of a node share. */
static double clock_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static Spent now(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  const Spent t = {clock_s(), (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                                  (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6};
  return t;
}

static Spent since(Spent begin) {
  Spent t = now();
  t.wall_s -= begin.wall_s;
  t.cpu_s -= begin.cpu_s;
  return t;
}

static float value(uint32_t index) {
  index *= 2654435761u;
  index ^= index >> 15;
  index *= 2246822519u;
  return (float)(index >> 16) * (1.0f / 65536.0f);
}

static uint32_t start_of(int rank, int buffer) {
  return (uint32_t)(kRankStep * rank + kBufferStep * buffer);
}

void* bench_allocate(size_t bytes) {
  void* data = NULL;
  if (posix_memalign(&data, 4096, bytes < 4096 ? 4096 : bytes) != 0) {
    fprintf(stderr, "worker: no memory for a buffer of %zu bytes\n", bytes);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return data;
}

/* The buffers of a kind of memory, kept between turns. */
typedef struct Kept {
  Buffers buffers;
  void (*give_back)(void* memory);
} Kept;
static Kept kept[2]; /* this rank's own memory, and that of a contender */

static void release(Kept* k) {
  for (int i = 0; i < k->buffers.pairs; i++) {
    if (k->buffers.in[i]) k->give_back(k->buffers.in[i]);
    if (k->buffers.out[i]) k->give_back(k->buffers.out[i]);
  }
  k->buffers.pairs = 0;
}

static void fill_inputs(Bench* b) {
  for (int k = 0; k < b->use.pairs; k++) {
    const uint32_t start = start_of(b->rank, k);
    for (size_t i = 0; i < b->use.count_in; i++) b->use.in[k][i] = value(start + (uint32_t)i);
  }
}

static int is_for(const Buffers* buffers, Collective collective, size_t bytes, int pairs) {
  return buffers->collective == collective && buffers->bytes == bytes && buffers->pairs == pairs;
}

static void shape(Bench* b, Buffers* new) {
  const size_t count = new->bytes / sizeof(float), ranks = (size_t)b->size;
  const size_t block = count < ranks ? 1 : count / ranks;
  switch (new->collective) {
    case kAllreduce:
      new->count_in = new->count_out = count;
      break;
    case kBroadcast:
      new->count_out = count;
      break;
    case kAllgather:
      new->count_in = block;
      new->count_out = block * ranks;
      break;
    case kReduceScatter:
      new->count_in = block * ranks;
      new->count_out = block;
      break;
    case kAlltoall:
      new->count_in = new->count_out = block * ranks;
      break;
    default:
      break;
  }
}

/* Chooses the buffers for a case; new ones where the last of their kind were for another. The
 * inputs stay as they are filled here. Returns 0, or fills b->why. */
static int choose_buffers(Bench* b, const Contender* c, Collective collective, size_t bytes,
                          int pairs) {
  static int serials;
  Kept* mine = &kept[c->allocate != NULL];
  if (!is_for(&mine->buffers, collective, bytes, pairs)) {
    for (int i = 0; i < 2; i++) { /* first, memory */
      if (!is_for(&kept[i].buffers, collective, bytes, pairs)) release(&kept[i]);
    }
    Buffers new = {.collective = collective, .bytes = bytes, .serial = ++serials};
    shape(b, &new);
    mine->give_back = c->free ? c->free : free;
    for (; new.pairs < pairs; new.pairs++) {
      float** const both[] = {&new.in[new.pairs], &new.out[new.pairs]};
      const size_t counts[] = {new.count_in, new.count_out};
      for (int i = 0; i < 2; i++) {
        if (counts[i] == 0) continue;
        *both[i] =
            c->allocate ? c->allocate(b, counts[i]) : bench_allocate(counts[i] * sizeof(float));
        if (*both[i] != NULL) continue;
        new.pairs++;
        mine->buffers = new;
        release(mine);
        return 1;
      }
    }
    mine->buffers = b->use = new;
    fill_inputs(b);
  }
  b->use = mine->buffers;
  return 0;
}

/* Fills the outputs with what is no number; where the root sends from them, with its data. */
static void spoil_outputs(Bench* b) {
  for (int k = 0; k < b->use.pairs; k++) {
    memset(b->use.out[k], 0xff, b->use.count_out * sizeof(float));
    if (b->use.collective != kBroadcast || b->rank != 0) continue;
    for (size_t i = 0; i < b->use.count_out; i++)
      b->use.out[k][i] = value(start_of(0, k) + (uint32_t)i);
  }
}

/* Element i of the result of buffer k. */
static float expected(const Bench* b, int k, size_t i) {
  const size_t block = b->use.count_out / (size_t)b->size;
  size_t at = i;
  switch (b->use.collective) {
    case kBroadcast:
      return value(start_of(0, k) + (uint32_t)i);
    case kAllgather:
      return value(start_of((int)(i / block), k) + (uint32_t)(i % block));
    case kAlltoall:
      return value(start_of((int)(i / block), k) + (uint32_t)((size_t)b->rank * block + i % block));
    case kReduceScatter:
      at = (size_t)b->rank * b->use.count_out + i;
      break;
    default:
      break;
  }
  float sum = 0;
  for (int r = 0; r < b->size; r++) sum += value(start_of(r, k) + (uint32_t)at);
  return sum;
}

/* The sums of an allreduce over many ranks, of which each adds up a part, or it would take ranks^2
 * additions in all; NULL where each adds up what it compares. Collective. */
static float* share_sums(const Bench* b, int k) {
  const size_t count = b->use.count_out, ranks = (size_t)b->size;
  if (b->use.collective != kAllreduce || ranks <= kRanksThatSumAll || count < ranks) return NULL;
  const size_t part = (count + ranks - 1) / ranks, first = part * (size_t)b->rank;
  float* mine = bench_allocate(part * sizeof(float));
  float* all = bench_allocate(part * ranks * sizeof(float));
  for (size_t i = 0; i < part; i++) mine[i] = expected(b, k, first + i);
  PMPI_Allgather(mine, (int)part, MPI_FLOAT, all, (int)part, MPI_FLOAT, b->world);
  free(mine);
  return all;
}

/* Compares the results of one buffer with `sums`, if given; writes the answer and returns 0 when
 * one is wrong. */
static int check(const Bench* b, const float* result, int k, const float* sums, double tolerance,
                 uint64_t* digest, FILE* peer) {
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < b->use.count_out; i++) {
    const float wanted = sums ? sums[i] : expected(b, k, i);
    uint32_t got, want;
    memcpy(&got, &result[i], 4);
    memcpy(&want, &wanted, 4);
    *digest += got;
    if (got == want || fabs((double)result[i] - (double)wanted) <= tolerance * (double)wanted) {
      continue;
    }
    if (wrong++ == 0) first = i;
  }
  if (wrong == 0) return 1;
  fprintf(peer,
          "{\"wrong\": \"buffer %d: %zu of %zu elements differ, the first is %zu: %.9g, expected "
          "%.9g\"}\n",
          k, wrong, b->use.count_out, first, (double)result[first], (double)expected(b, k, first));
  return 0;
}

static void refuse(Bench* b, FILE* peer) {
  for (char* c = b->why; *c; c++) {
    if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = '\'';
  }
  fprintf(peer, "{\"error\": \"%s\"}\n", b->why);
  b->why[0] = 0;
}

/* When each batch began, and its seconds per call. Returns what the last call returned. */
static int time_batches(Bench* b, const Contender* c, int calls, int batches, double* begins,
                        double* seconds) {
  int failed = 0, used = 0;
  for (int k = 0; k < b->use.pairs && !failed; k++) failed = c->call(b, k);
  spoil_outputs(b); /* so that what is checked was written by the timed calls */
  for (int batch = 0; batch < batches && !failed; batch++) {
    if (c->in_place) fill_inputs(b);
    PMPI_Barrier(b->world);
    begins[batch] = clock_s();
    for (int i = 0; i < calls && !failed; i++, used++) failed = c->call(b, used % b->use.pairs);
    seconds[batch] = (clock_s() - begins[batch]) / calls;
  }
  return failed;
}

static void write_list(FILE* peer, const char* name, const double* values, int count) {
  fprintf(peer, ", \"%s\": [", name);
  for (int i = 0; i < count; i++) fprintf(peer, "%s%.12g", i ? ", " : "", values[i]);
  fprintf(peer, "]");
}

static void measure(Bench* b, const Contender* c, Collective collective, size_t bytes, int calls,
                    int batches, int pairs, FILE* peer) {
  static double begins[kMaxBatches], seconds[kMaxBatches];
  if (pairs < 1 || pairs > kMaxBuffers || batches > kMaxBatches) {
    fprintf(peer, "{\"error\": \"too many buffers or batches\"}\n");
    return;
  }
  if (!(c->collectives >> collective & 1)) {
    fprintf(peer, "{\"missing\": \"there is no %s in the C program\"}\n", kNames[collective]);
    return;
  }
  if (choose_buffers(b, c, collective, bytes, pairs) ||
      time_batches(b, c, calls, batches, begins, seconds)) {
    if (!b->why[0]) snprintf(b->why, sizeof b->why, "%s returned an error", kNames[collective]);
    refuse(b, peer);
    return;
  }
  const double tolerance = c->tolerance ? c->tolerance() : 0;
  uint64_t digest = 0;
  int right = 1;
  for (int i = 0; !c->unchecked && i < pairs && i < calls; i++) { /* those of the last batch */
    const int k = (calls * batches - 1 - i) % pairs;
    const float* result = c->in_place ? b->use.in[k] : b->use.out[k];
    float* sums = share_sums(b, k); /* by all ranks, also by one that was wrong */
    right = right && check(b, result, k, sums, tolerance, &digest, peer);
    free(sums);
  }
  if (!right) return;
  if (c->in_place) fill_inputs(b); /* for who comes next */
  fprintf(peer, "{\"digest\": %llu", (unsigned long long)digest);
  write_list(peer, "begins", begins, batches);
  write_list(peer, "seconds", seconds, batches);
  fprintf(peer, "}\n");
}

static void tell_state(Bench* b, FILE* peer) {
  double fresh, memory;
  probe_machine(b, &fresh, &memory);
  fprintf(peer, "{\"facts\": {");
  if (memory > 0) {
    fprintf(peer,
            "\"fresh_line_gb_s\": %.3g, \"memory_gb_s\": %.3g, \"shared_last_level_cache\": %s",
            fresh, memory, fresh > memory / 2 ? "true" : "false");
  }
  fprintf(peer, "}}\n");
}

static void setup(Bench* b, int which, const char* word, FILE* peer) {
  char* facts = NULL;
  size_t length;
  FILE* text = open_memstream(&facts, &length);
  PMPI_Barrier(b->world); /* what others are late for is no cost of this one */
  const Spent begin = now();
  const int failed = kContenders[which]->start(b, word, text);
  const Spent spent = since(begin);
  fclose(text);
  started[which] = !failed;
  if (failed) {
    refuse(b, peer);
  } else {
    fprintf(peer, "{\"facts\": {%s}, \"setup\": [%.6g, %.6g], \"init\": [%.6g, %.6g]}\n", facts,
            spent.wall_s, spent.cpu_s, initializing.wall_s, initializing.cpu_s);
  }
  free(facts);
}

static void obey(Bench* b, const char* line, FILE* peer) {
  char name[32], collective[32] = "", word[512] = "";
  unsigned long long bytes;
  int calls, batches, pairs, which = 0, op = 0;
  const int found = sscanf(line, "%*s %31s %511s", name, word);
  while (which < kContenderCount && (found < 1 || strcmp(name, kContenders[which]->name))) which++;
  if (!strncmp(line, "probe", 5)) {
    tell_state(b, peer);
  } else if (!strncmp(line, "release", 7)) {
    release(&kept[0]);
    release(&kept[1]);
    fprintf(peer, "{}\n");
  } else if (which == kContenderCount) {
    fprintf(peer, "{\"error\": \"this program has no such candidate\"}\n");
  } else if (sscanf(line, "measure %31s %31s %llu %d %d %d", name, collective, &bytes, &calls,
                    &batches, &pairs) == 6) {
    while (op < kCollectives - 1 && strcmp(collective, kNames[op])) op++;
    measure(b, kContenders[which], (Collective)op, (size_t)bytes, calls, batches, pairs, peer);
  } else {
    setup(b, which, word, peer);
  }
}

static int connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
  return fd >= 0 && connect(fd, (struct sockaddr*)&address, sizeof address) == 0 ? fd : -1;
}

int main(int argc, char** argv) {
  static Bench b;
  const Spent begin = now();
  MPI_Init(&argc, &argv);
  initializing = since(begin);
  b.world = MPI_COMM_WORLD;
  MPI_Comm_rank(b.world, &b.rank);
  MPI_Comm_size(b.world, &b.size);
  const int fd = argc == 2 ? connect_to(argv[1]) : -1;
  FILE* orders = fd < 0 ? NULL : fdopen(fd, "r");
  FILE* peer = fd < 0 ? NULL : fdopen(dup(fd), "w");
  if (orders == NULL || peer == NULL) {
    fprintf(stderr, "worker: cannot reach the parent; start benchmarks/allreduce.py instead\n");
    MPI_Abort(b.world, 1);
  }
  fprintf(peer, "%d\n", b.rank);
  fflush(peer);
  char line[1024];
  int ended = 0;
  while (!ended && fgets(line, sizeof line, orders)) {
    ended = !strncmp(line, "end", 3);
    if (ended) {
      fprintf(peer, "{}\n");
    } else {
      obey(&b, line, peer);
    }
    fflush(peer);
  }
  release(&kept[0]);
  release(&kept[1]);
  for (int i = 0; i < kContenderCount; i++) {
    if (started[i] && kContenders[i]->stop) kContenders[i]->stop(&b);
  }
  MPI_Finalize();
  fclose(orders);
  fclose(peer);
  return 0;
}
