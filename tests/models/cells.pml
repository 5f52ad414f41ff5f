/* The cells of small collectives (hsgd/csrc/node/segments/segment_layout.hpp, CellHeader) under weak memory.
 *
 * Each rank writes its payload into a cell of its own, then the collective's number (release); all
 * wait for the numbers of all (acquire) and read the payloads. Cells are used in turns. Checked:
 * what is read is of this collective, whatever order the processor takes.
 *
 * Must fail: PLAIN_NUMBER (stored without release), EARLY_PAYLOAD (loaded without acquire) and
 * CELLS=1, where the next collective's payload comes over one that is still being read.
 */
#ifndef CELLS
#define CELLS 2
#endif
#define COLLECTIVES 3
#define PROCESSES 2
#define PLACES (2 * 2 * CELLS)
#define ME me
#define PAYLOAD(rank, n) ((rank) * 2 * CELLS + (n) % CELLS)
#define NUMBER(rank, n) ((rank) * 2 * CELLS + CELLS + (n) % CELLS)
#include "weak_memory.pml"

proctype rank(byte me; byte other) {
  byte n = 1, seen, value, i;
  do
  :: n > COLLECTIVES -> break;
  :: else ->
     plain_store(PAYLOAD(me, n), n);
#ifdef PLAIN_NUMBER
     plain_store(NUMBER(me, n), n);
#else
     release(NUMBER(me, n), n);
#endif
     seen = 0;
     do
     :: seen == n -> break;
     :: else ->
#ifdef EARLY_PAYLOAD
        plain_load(NUMBER(other, n), seen);
#else
        acquire(NUMBER(other, n), seen, i);
#endif
     od;
     plain_load(PAYLOAD(other, n), value);
     assert(value == n);
     n++;
  od
}

init { atomic { run rank(0, 1); run rank(1, 0); } }
