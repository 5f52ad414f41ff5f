/* The pipeline of large collectives (hsgd/csrc/collectives/chunk_pipeline.cpp) under weak memory: two
 * ranks, each with an in ring and an out ring of SLOTS places, and three counters (Progress).
 *
 *   staged    own input of the step lies in the in ring     others may reduce it
 *   reduced   own slice lies in the out ring                in rings of the step are free
 *   gathered  all is read                                   out rings of the step are free
 *
 * Checked: who reads a slot finds the step that it waited for. Must fail: PLAIN_STAGED, PLAIN_REDUCED
 * (the counter is seen before the data), EARLY_REDUCED, EARLY_GATHERED (seen before what it frees is
 * read, as a store without release may be), NO_ROOM (the in ring is written before all have reduced).
 */
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#define PROCESSES 2
#define EACH (2 * SLOTS + 3)
#define PLACES (2 * EACH)
#define ME me
#define IN(rank, step) ((rank) * EACH + (step) % SLOTS)
#define OUT(rank, step) ((rank) * EACH + SLOTS + (step) % SLOTS)
#define STAGED(rank) ((rank) * EACH + 2 * SLOTS)
#define REDUCED(rank) ((rank) * EACH + 2 * SLOTS + 1)
#define GATHERED(rank) ((rank) * EACH + 2 * SLOTS + 2)
#include "weak_memory.pml"

inline stage() {
  acquire(REDUCED(other), seen, i);
  if
#ifdef NO_ROOM
  :: true ->
#else
  :: seen + SLOTS > staged && reduced + SLOTS > staged ->
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

inline reduce() {
  acquire(GATHERED(other), seen, i);
  if
  :: seen + SLOTS > reduced && gathered + SLOTS > reduced ->
     acquire(STAGED(other), seen, i);
     if
     :: seen > reduced ->
        reduced++;
#ifdef EARLY_REDUCED
        release(REDUCED(me), reduced);
#endif
        plain_load(IN(other, reduced), value);
        assert(value == reduced);
        plain_store(OUT(me, reduced), reduced);
#ifdef PLAIN_REDUCED
        plain_store(REDUCED(me), reduced);
#endif
#ifndef EARLY_REDUCED
#ifndef PLAIN_REDUCED
        release(REDUCED(me), reduced);
#endif
#endif
     :: else -> skip;
     fi
  :: else -> skip;
  fi
}

inline gather() {
  acquire(REDUCED(other), seen, i);
  if
  :: seen > gathered ->
     gathered++;
#ifdef EARLY_GATHERED
     release(GATHERED(me), gathered);
#endif
     plain_load(OUT(other, gathered), value);
     assert(value == gathered);
#ifndef EARLY_GATHERED
     release(GATHERED(me), gathered);
#endif
  :: else -> skip;
  fi
}

/* Whatever can go on goes on, in any order. */
proctype rank(byte me; byte other) {
  byte staged, reduced, gathered, seen, value, i;
  do
  :: staged < STEPS -> stage();
  :: reduced < staged -> reduce();
  :: gathered < reduced -> gather();
  :: gathered == STEPS -> break;
  od
}

init { atomic { run rank(0, 1); run rank(1, 0); } }
