/* The pipeline of a large allreduce on one node (hsgd/csrc/collectives/kinds/chunk_pipeline.cpp and
 * allreduce.cpp) under weak memory: the slice that rank 0 sums, of three ranks. Ranks 1 and 2 have an in
 * ring of SLOTS places each; rank 0 writes the sum over the input of rank 1, where both gather it.
 *
 *   staged    own input of the step lies in the in ring          rank 0 may reduce it
 *   reduced   the sum lies over the input of rank 1              others may gather it
 *   gathered  all is read                                        in rings of the step are free
 *
 * Checked: who reads a slot finds what it waited for, the input or the sum of the step. Must fail:
 * PLAIN_STAGED, PLAIN_REDUCED (the counter is seen before the data), EARLY_REDUCED, EARLY_GATHERED (seen
 * before what it stands for is done), NO_ROOM (the in ring is written before it is free), OWN_ROOM (it
 * is taken as free when its owner alone has gathered).
 */
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#define PROCESSES 3
#define PLACES (2 * SLOTS + 5)
#define ME me
#define IN(rank, step) (((rank) - 1) * SLOTS + (step) % SLOTS)
#define STAGED(rank) (2 * SLOTS + (rank) - 1)
#define GATHERED(rank) (2 * SLOTS + 1 + (rank))
#define REDUCED (2 * SLOTS + 4)
#define SUM(step) ((step) + 2)
#include "weak_memory.pml"

inline stage() {
  acquire(GATHERED(other), seen, i);
  if
#ifdef NO_ROOM
  :: true ->
#else
#ifdef OWN_ROOM
  :: gathered + SLOTS > staged ->
#else
  :: seen + SLOTS > staged && gathered + SLOTS > staged ->
#endif
#endif
     staged++;
     plain_store(IN(me, staged), staged);
#ifdef PLAIN_STAGED
     plain_store(STAGED(me), staged);
#else
     release(STAGED(me), staged);
#endif
  :: else -> skip;
  fi
}

inline gather() {
  acquire(REDUCED, seen, i);
  if
  :: seen > gathered ->
     gathered++;
#ifdef EARLY_GATHERED
     release(GATHERED(me), gathered);
#endif
     plain_load(IN(1, gathered), value);
     assert(value == SUM(gathered));
#ifndef EARLY_GATHERED
     release(GATHERED(me), gathered);
#endif
  :: else -> skip;
  fi
}

inline reduce() {
  reduced++;
#ifdef EARLY_REDUCED
  release(REDUCED, reduced);
#endif
  plain_load(IN(1, reduced), value);
  assert(value == reduced);
  plain_load(IN(2, reduced), value);
  assert(value == reduced);
  plain_store(IN(1, reduced), SUM(reduced));
#ifdef PLAIN_REDUCED
  plain_store(REDUCED, reduced);
#endif
#ifndef EARLY_REDUCED
#ifndef PLAIN_REDUCED
  release(REDUCED, reduced);
#endif
#endif
}

proctype sums(byte me) {
  byte reduced, first, second, value, i;
  do
  :: reduced < STEPS ->
     acquire(STAGED(1), first, i);
     acquire(STAGED(2), second, i);
     if
     :: first > reduced && second > reduced -> reduce();
     :: else -> skip;
     fi
  :: reduced == STEPS -> break;
  od
}

/* Whatever can go on goes on, in any order. */
proctype owns(byte me; byte other) {
  byte staged, gathered, seen, value, i;
  do
  :: staged < STEPS -> stage();
  :: gathered < staged -> gather();
  :: gathered == STEPS -> break;
  od
}

init { atomic { run sums(0); run owns(1, 2); run owns(2, 1); } }
