/* A rank sleeps until a flag changes (hsgd/csrc/core/os/wait.hpp, Doorbell) under weak memory.
 *
 * Who sleeps counts itself (asleep), then looks at the flag once more, and sleeps while nobody has
 * rung since. Who changes the flag looks at asleep, and rings where it is not zero. Checked: nobody
 * sleeps on when the flag has changed (spin finds the state in which nothing can go on), and who
 * sees the flag sees what was written before. The sleep of the library ends after 20 ms in any case.
 *
 * Must fail: NO_FENCE (between the count and the last look), OUT_OF_ORDER (the flag is a release, and
 * the look at asleep may come first), PLAIN_FLAG.
 */
#define PROCESSES 2
#define PLACES 4
#define ME me
#define DATA 0
#define FLAG 1
#define ASLEEP 2
#define RINGS 3
#include "weak_memory.pml"

proctype sleeper(byte me) {
  byte seen, rings, value, i;
#ifdef NO_FENCE
  plain_store(ASLEEP, 1); /* the store of the addition, which later loads may pass */
#else
  add(ASLEEP, 1, value, i);
  fence(i);
#endif
  acquire(RINGS, rings, i);
  acquire(FLAG, seen, i);
  if
  :: seen == 0 -> memory[RINGS] != rings; /* futex: the kernel looks at memory itself */
  :: else -> skip;
  fi;
  do
  :: seen == 1 -> break;
  :: else -> acquire(FLAG, seen, i);
  od;
  plain_load(DATA, value);
  assert(value == 1);
}

proctype waker(byte me) {
  byte asleep, value, i;
  plain_store(DATA, 1);
#ifdef PLAIN_FLAG
  plain_store(FLAG, 1);
#else
  release(FLAG, 1);
#endif
#ifdef OUT_OF_ORDER
  acquire(ASLEEP, asleep, i);
#else
  acquire_in_order(ASLEEP, asleep, i);
#endif
  if
  :: asleep != 0 -> add(RINGS, 1, value, i);
  :: else -> skip;
  fi
}

init { atomic { run sleeper(0); run waker(1); } }
