/* How ranks of a node know that all have come (hsgd/csrc/node/segments/combining_tree.hpp) under weak memory.
 *
 * Each rank writes, counts itself (acq_rel), and the last one says so (release); who sees that
 * (acquire) reads what all wrote. Checked: it is there. Must fail: PLAIN_COUNT (counted without
 * order), EARLY_DATA (seen without acquire). That the last one says so by a release is asked by C++,
 * not by ARMv8: all had been brought to memory when it counted.
 */
#define PROCESSES 3
#define PLACES (PROCESSES + 2)
#define ME me
#define DATA(rank) (rank)
#define COUNT PROCESSES
#define REACHED (PROCESSES + 1)
#include "weak_memory.pml"

proctype rank(byte me) {
  byte seen, value, other, i;
  plain_store(DATA(me), 1);
#ifdef PLAIN_COUNT
  plain_add(COUNT, 1, value, i);
#else
  add(COUNT, 1, value, i);
#endif
  if
  :: value == PROCESSES ->
     release(REACHED, 1);
  :: else -> skip;
  fi;
  do
  :: seen == 1 -> break;
  :: else ->
#ifdef EARLY_DATA
     plain_load(REACHED, seen);
#else
     acquire(REACHED, seen, i);
#endif
  od;
  do
  :: other == PROCESSES -> break;
  :: else -> plain_load(DATA(other), value); assert(value == 1); other++;
  od
}

init { atomic { run rank(0); run rank(1); run rank(2); } }
