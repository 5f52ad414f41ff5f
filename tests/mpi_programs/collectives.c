/* Random calls of every collective that the interposer knows, each made twice: through MPI and, on
 * copies of all buffers, through PMPI. Afterwards the buffers must be equal, with all that lies
 * between and behind the elements.
 *
 *   collectives ROUNDS SEED THREADS alike|mixed
 *
 * Each thread has communicators of its own. Mixed: ranks describe the same integers with datatypes
 * of their own. MPI allows it, but Open MPI (5.0.11) cuts large broadcasts by the size of each
 * rank's own datatype, and delivers wrong data, and chooses the algorithm of MPI_Allgatherv by it,
 * and hangs. So PMPI gets plain integers, packed before and unpacked afterwards, and nothing may
 * pass through when datatypes are mixed.
 */
#include <pthread.h>

#include "check.h"

enum { kMostInts = 96000, kComms = 3, kUnit = 12, kMostRanks = 64, kLayouts = 6 };

typedef struct {
  unsigned shared, own; /* states of random numbers: the same on all ranks, and this rank's */
  MPI_Comm comms[kComms];
  int *in, *in_copy, *out, *out_copy;
} work;

static unsigned next(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 9;
}

/* --- buffers: each has room for the widest layout --- */

static const size_t kRoom = 2 * (size_t)kMostInts + 64;

static void fill(unsigned* state, int* data, int* copy) {
  for (size_t i = 0; i < kRoom; ++i) data[i] = (int)(next(state) & 0xff);
  memcpy(copy, data, kRoom * sizeof *data);
}

static int equal(const int* data, const int* copy) {
  return memcmp(data, copy, kRoom * sizeof *data) == 0;
}

/* --- datatypes: all hold integers, as many as they are asked for --- */

typedef struct {
  MPI_Datatype type;
  int ints; /* in one element */
} layout;

static int mixed;

static layout make_layout(work* w) {
  const unsigned alike = next(&w->shared), choice = mixed ? next(&w->own) : alike;
  layout made = {MPI_INT, 1};
  MPI_Datatype inner;
  const int swapped[] = {1, 0}, behind[] = {1, 2}, twice[] = {1, 1};
  switch (choice % kLayouts) {
    case 0:
      return made;
    case 1: /* packed, though derived */
      made.ints = 3;
      MPI_Type_contiguous(3, MPI_INT, &made.type);
      break;
    case 2: /* with gaps, also behind the last one */
      made.ints = 2;
      MPI_Type_vector(2, 1, 2, MPI_INT, &inner);
      MPI_Type_create_resized(inner, 0, 4 * sizeof(int), &made.type);
      MPI_Type_free(&inner);
      break;
    case 3: /* without gaps, in another order */
      made.ints = 2;
      MPI_Type_indexed(2, twice, swapped, MPI_INT, &made.type);
      break;
    case 4: /* without gaps, but not from the first byte on */
      made.ints = 2;
      MPI_Type_indexed(2, twice, behind, MPI_INT, &made.type);
      break;
    default: /* a copy of a packed one of the one before */
      made.ints = 4;
      MPI_Type_indexed(2, twice, swapped, MPI_INT, &inner);
      MPI_Type_contiguous(2, inner, &made.type);
      MPI_Type_free(&inner);
  }
  MPI_Type_commit(&made.type);
  return made;
}

static void free_layout(layout* made) {
  if (made->type != MPI_INT) MPI_Type_free(&made->type);
}

/* --- the collectives --- */

static void bcast(work* w, MPI_Comm comm, int ranks, int ints) {
  layout mine = make_layout(w);
  const int root = (int)next(&w->shared) % ranks, count = ints / mine.ints;
  fill(&w->own, w->out, w->out_copy);
  CHECK(MPI_Bcast(w->out, count, mine.type, root, comm) == MPI_SUCCESS);
  int *plain = malloc((size_t)ints * sizeof(int)), position = 0;
  const int bytes = ints * (int)sizeof(int);
  PMPI_Pack(w->out_copy, count, mine.type, plain, bytes, &position, MPI_COMM_SELF);
  PMPI_Bcast(plain, ints, MPI_INT, root, comm);
  position = 0;
  PMPI_Unpack(plain, bytes, &position, w->out_copy, count, mine.type, MPI_COMM_SELF);
  free(plain);
  free_layout(&mine);
}

/* What MPI_Allgather(v) must do, with plain integers on the way. */
static void gather_plainly(const void* in, int own_ints, layout from, int* out, const int* ints,
                           const int* places, layout to, MPI_Comm comm) {
  static const int kBytes = (int)sizeof(int);
  int me, ranks, position = 0, ends[kMostRanks + 1] = {0};
  MPI_Aint lower, extent;
  MPI_Type_get_extent(to.type, &lower, &extent);
  MPI_Comm_rank(comm, &me);
  MPI_Comm_size(comm, &ranks);
  for (int r = 0; r < ranks; ++r) ends[r + 1] = ends[r] + ints[r];
  int *sent = malloc((size_t)own_ints * sizeof(int) + 1), *got = malloc(kRoom * sizeof(int));
  if (in == MPI_IN_PLACE) in = (char*)out + places[me] * extent, from = to;
  PMPI_Pack(in, own_ints / from.ints, from.type, sent, own_ints * kBytes, &position, MPI_COMM_SELF);
  PMPI_Allgatherv(sent, own_ints, MPI_INT, got, ints, ends, MPI_INT, comm);
  for (int r = 0; r < ranks; ++r) {
    position = 0;
    PMPI_Unpack(got + ends[r], ints[r] * kBytes, &position, (char*)out + places[r] * extent,
                ints[r] / to.ints, to.type, MPI_COMM_SELF);
  }
  free(sent), free(got);
}

static void allgather(work* w, MPI_Comm comm, int ranks, int ints) {
  layout from = make_layout(w), to = mixed ? make_layout(w) : from;
  const int block = ints / ranks / kUnit * kUnit, in_place = next(&w->shared) % 3 == 0;
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  const void* in = in_place ? MPI_IN_PLACE : w->in;
  CHECK(MPI_Allgather(in, block / from.ints, from.type, w->out, block / to.ints, to.type, comm) ==
        MPI_SUCCESS);
  int ints_of[kMostRanks], places[kMostRanks];
  for (int r = 0; r < ranks; ++r) ints_of[r] = block, places[r] = r * (block / to.ints);
  gather_plainly(in, block, from, w->out_copy, ints_of, places, to, comm);
  free_layout(&from);
  if (mixed) free_layout(&to);
}

static void allgatherv(work* w, MPI_Comm comm, int ranks, int ints) {
  layout from = make_layout(w), to = mixed ? make_layout(w) : from;
  const int in_place = next(&w->shared) % 3 == 0, gaps = (int)next(&w->own) % 2;
  const int backwards = (int)next(&w->own) % 2;
  int ints_of[kMostRanks], counts[kMostRanks], places[kMostRanks], me, end = 0;
  MPI_Comm_rank(comm, &me);
  for (int r = 0; r < ranks; ++r) {
    ints_of[r] = (int)(next(&w->shared) % (unsigned)(ints / ranks / kUnit + 1)) * kUnit;
    if (next(&w->shared) % 5 == 0) ints_of[r] = 0;
  }
  const int own = ints_of[me];
  for (int i = 0; i < ranks; ++i) {
    const int r = backwards ? ranks - 1 - i : i;
    counts[r] = ints_of[r] / to.ints;
    places[r] = end;
    end += counts[r] + gaps;
  }
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  const void* in = in_place ? MPI_IN_PLACE : w->in;
  CHECK(MPI_Allgatherv(in, own / from.ints, from.type, w->out, counts, places, to.type, comm) ==
        MPI_SUCCESS);
  gather_plainly(in, own, from, w->out_copy, ints_of, places, to, comm);
  free_layout(&from);
  if (mixed) free_layout(&to);
}

static MPI_Op choose_op(work* w) {
  const MPI_Op ops[] = {MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD};
  return ops[next(&w->shared) % 4];
}

static void allreduce(work* w, MPI_Comm comm, int ranks, int ints) {
  const MPI_Op op = choose_op(w);
  (void)ranks;
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  const void* in = next(&w->shared) % 3 == 0 ? MPI_IN_PLACE : w->in;
  CHECK(MPI_Allreduce(in, w->out, ints, MPI_INT, op, comm) == MPI_SUCCESS);
  PMPI_Allreduce(in, w->out_copy, ints, MPI_INT, op, comm);
}

/* An op of the program's own: (a, b) stands for x -> a x + b, and the op does one after the other,
 * which is not the same the other way round. Pairs lie as the datatype says.
 */
static void compose_pair(const unsigned* first, const unsigned* second, unsigned* both, int step) {
  const unsigned a = first[0] * second[0], b = second[0] * first[step] + second[step];
  both[0] = a, both[step] = b;
}

static void compose(void* in, void* in_out, int* count, MPI_Datatype* type) {
  MPI_Aint lower, extent;
  MPI_Type_get_extent(*type, &lower, &extent);
  const int ints = (int)(extent / (MPI_Aint)sizeof(int)), step = ints / 2;
  for (int i = 0; i < *count; ++i) {
    unsigned* second = (unsigned*)in_out + (size_t)i * ints;
    compose_pair((unsigned*)in + (size_t)i * ints, second, second, step);
  }
}

static void allreduce_user(work* w, MPI_Comm comm, int ranks, int ints) {
  MPI_Op op;
  MPI_Datatype inner, pair;
  const int pairs = ints / 2, in_place = next(&w->shared) % 3 == 0;
  const unsigned alike = next(&w->shared), choice = mixed ? next(&w->own) : alike;
  if (choice % 2 == 0) {
    MPI_Type_contiguous(2, MPI_INT, &pair);
  } else {
    MPI_Type_vector(2, 1, 2, MPI_INT, &inner);
    MPI_Type_create_resized(inner, 0, 4 * sizeof(int), &pair);
    MPI_Type_free(&inner);
  }
  MPI_Type_commit(&pair);
  MPI_Op_create(compose, 0, &op);
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  CHECK(MPI_Allreduce(in_place ? MPI_IN_PLACE : w->in, w->out, pairs, pair, op, comm) ==
        MPI_SUCCESS);

  int position = 0;
  const int bytes = 2 * pairs * (int)sizeof(int);
  unsigned *plain = malloc((size_t)bytes), *all = malloc((size_t)(bytes * ranks));
  PMPI_Pack(in_place ? w->out_copy : w->in_copy, pairs, pair, plain, bytes, &position,
            MPI_COMM_SELF);
  PMPI_Allgather(plain, 2 * pairs, MPI_INT, all, 2 * pairs, MPI_INT, comm);
  for (int r = 1; r < ranks; ++r)
    for (int i = 0; i < 2 * pairs; i += 2)
      compose_pair(all + i, all + (size_t)r * 2 * pairs + i, all + i, 1);
  position = 0;
  PMPI_Unpack(all, bytes, &position, w->out_copy, pairs, pair, MPI_COMM_SELF);
  free(plain), free(all);
  MPI_Op_free(&op);
  MPI_Type_free(&pair);
}

static void reduce_scatter(work* w, MPI_Comm comm, int ranks, int ints) {
  const MPI_Op op = choose_op(w);
  int counts[kMostRanks];
  for (int r = 0; r < ranks; ++r)
    counts[r] = (int)(next(&w->shared) % (unsigned)(ints / ranks + 1));
  if (next(&w->shared) % 4 == 0) counts[next(&w->shared) % (unsigned)ranks] = 0;
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  const int in_place = next(&w->shared) % 3 == 0;
  const void* in = in_place ? MPI_IN_PLACE : w->in;
  CHECK(MPI_Reduce_scatter(in, w->out, counts, MPI_INT, op, comm) == MPI_SUCCESS);
  PMPI_Reduce_scatter(in, w->out_copy, counts, MPI_INT, op, comm);
  if (in_place) { /* what lies behind the block is not defined then */
    int me;
    MPI_Comm_rank(comm, &me);
    memcpy(w->out + counts[me], w->out_copy + counts[me],
           (kRoom - (size_t)counts[me]) * sizeof(int));
  }
}

static void reduce_scatter_block(work* w, MPI_Comm comm, int ranks, int ints) {
  const MPI_Op op = choose_op(w);
  const int count = ints / ranks;
  fill(&w->own, w->in, w->in_copy);
  fill(&w->own, w->out, w->out_copy);
  const int in_place = next(&w->shared) % 3 == 0;
  const void* in = in_place ? MPI_IN_PLACE : w->in;
  CHECK(MPI_Reduce_scatter_block(in, w->out, count, MPI_INT, op, comm) == MPI_SUCCESS);
  PMPI_Reduce_scatter_block(in, w->out_copy, count, MPI_INT, op, comm);
  if (in_place) memcpy(w->out + count, w->out_copy + count, (kRoom - (size_t)count) * sizeof(int));
}

static void barrier(work* w, MPI_Comm comm, int ranks, int ints) {
  (void)w, (void)ranks, (void)ints;
  CHECK(MPI_Barrier(comm) == MPI_SUCCESS);
}

static void (*const kCalls[])(work*, MPI_Comm, int, int) = {
    bcast,          allgather,      allgatherv,           allreduce,
    allreduce_user, reduce_scatter, reduce_scatter_block, barrier};

static int rounds;

static void* run(void* argument) {
  work* w = argument;
  for (int round = 0; round < rounds; ++round) {
    const unsigned call = next(&w->shared) % (sizeof kCalls / sizeof *kCalls);
    const unsigned wide = 1u << (4 + next(&w->shared) % 13); /* all magnitudes alike */
    const int ints = (int)(kUnit + next(&w->shared) % (wide + wide / 3)) / kUnit * kUnit;
    MPI_Comm comm = w->comms[next(&w->shared) % kComms];
    const unsigned before = w->shared;
    if (comm != MPI_COMM_NULL) {
      int ranks;
      MPI_Comm_size(comm, &ranks);
      kCalls[call](w, comm, ranks, ints);
      if (!equal(w->in, w->in_copy) || !equal(w->out, w->out_copy)) {
        fprintf(stderr, "rank %d of %d: round %d: call %u of %d integers\n", rank, ranks, round,
                call, ints);
        CHECK(!"results are those of MPI");
      }
    }
    w->shared = before * 2654435761u + 1; /* also where this rank was no member */
  }
  return NULL;
}

static int* buffer(void) { return calloc(kRoom, sizeof(int)); }

int main(int argc, char** argv) {
  enum { kMostThreads = 2 };
  int level, threads = argc > 3 ? atoi(argv[3]) : 1;
  work works[kMostThreads];
  pthread_t ids[kMostThreads];
  MPI_Init_thread(&argc, &argv, threads > 1 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  CHECK(argc > 4 && threads <= kMostThreads && size <= kMostRanks);
  CHECK(threads == 1 || level == MPI_THREAD_MULTIPLE);
  rounds = atoi(argv[1]);
  mixed = strcmp(argv[4], "mixed") == 0;
  for (int i = 0; i < threads; ++i) {
    work* w = &works[i];
    w->shared = (unsigned)atoi(argv[2]) + 1000u * (unsigned)i;
    w->own = w->shared + 77u * (unsigned)(rank + 1);
    /* The world is set up at once, the others when they have paid for it. */
    w->comms[0] = MPI_COMM_WORLD;
    if (i > 0) MPI_Comm_dup(MPI_COMM_WORLD, &w->comms[0]);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &w->comms[1]);
    MPI_Comm_split(MPI_COMM_WORLD, rank > 0 ? 0 : MPI_UNDEFINED, rank, &w->comms[2]);
    w->in = buffer(), w->in_copy = buffer(), w->out = buffer(), w->out_copy = buffer();
  }
  for (int i = 1; i < threads; ++i) pthread_create(&ids[i], NULL, run, &works[i]);
  run(&works[0]);
  for (int i = 1; i < threads; ++i) pthread_join(ids[i], NULL);
  for (int i = 0; i < threads; ++i) {
    for (int c = 0; c < kComms; ++c)
      if (works[i].comms[c] != MPI_COMM_NULL && works[i].comms[c] != MPI_COMM_WORLD)
        MPI_Comm_free(&works[i].comms[c]);
    free(works[i].in), free(works[i].in_copy), free(works[i].out), free(works[i].out_copy);
  }
  tell_collectives();
  finish();
  return 0;
}
