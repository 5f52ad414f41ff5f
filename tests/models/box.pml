/* The chunks of a ParameterBox, as hsgd/csrc/onesided/box/chunks.cpp changes and reads them.
 *
 * Two writers add one to both values of each chunk, and may die between any two steps, also while
 * they make good for one another; a reader reads without a lock; then somebody takes all locks.
 * Checked: the reader sees both values equal, and all that was published before it began; in the end
 * the values are the number of changes that were published.
 *
 * HOME_FIRST, TELL_FIRST, NO_SECOND_LOOK, NO_JOURNAL_CHECK and NO_SETTLING take one rule away each,
 * and must fail.
 */
#define WRITERS 2
#define CHUNKS 2
#define JOURNALS 2
#define NOBODY 255
#define NONE 255
#define LAST WRITERS   /* who comes in the end, and does not die */
#define HOME 0
#define PLACES (JOURNALS + 1)

byte home[CHUNKS * 2], draft[JOURNALS * 2];
byte state[CHUNKS];            /* version * PLACES + HOME or journal + 1 */
byte chunk_of[JOURNALS];
byte chunk_lock[CHUNKS], journal_lock[JOURNALS];
bool unsettled[CHUNKS];        /* its holder died, and nobody has said that all is well */
bool dead[WRITERS + 1];
byte told[CHUNKS], ended;

#define FIRST(c) (8 * c)      /* the value of a chunk in the beginning */
#define FREE(lock) (lock == NOBODY || dead[lock])
#define MAY_DIE if :: me != LAST -> dead[me] = true; goto end; :: true -> skip; fi

/* With the lock: as took_chunk(). */
#ifdef NO_SETTLING
#define SETTLE(c) skip
#else
#define SETTLE(c)                                                               \
  if                                                                            \
  :: unsettled[c] ->                                                            \
     if                                                                         \
     :: state[c] % PLACES != HOME ->                                            \
        from = state[c] % PLACES - 1;                                           \
        home[2 * c] = draft[2 * from];                                          \
        MAY_DIE;                                                                \
        home[2 * c + 1] = draft[2 * from + 1];                                  \
        MAY_DIE;                                                                \
        state[c] = state[c] / PLACES * PLACES;                                  \
     :: else -> skip;                                                           \
     fi;                                                                        \
     unsettled[c] = false;                                                      \
  :: else -> skip;                                                              \
  fi
#endif

#define LOCK(c)                                                                 \
  atomic {                                                                      \
    FREE(chunk_lock[c]);                                                        \
    unsettled[c] = unsettled[c] || chunk_lock[c] != NOBODY;                     \
    chunk_lock[c] = me;                                                         \
  }                                                                             \
  SETTLE(c)

#define PUBLISH(c, j)                                                           \
  d_step { state[c] = (state[c] / PLACES + 1) * PLACES + j + 1; told[c]++; }

#define BRING_HOME(c, j)                                                        \
  home[2 * c] = draft[2 * j];                                                   \
  MAY_DIE;                                                                      \
  home[2 * c + 1] = draft[2 * j + 1];                                           \
  MAY_DIE

proctype writer(byte me) {
  byte mine = 0, i = 0, c = 0, from = 0;
  /* any journal that is free */
  do
  :: atomic {
       FREE(journal_lock[0]) -> journal_lock[0] = me; mine = 0;
     }
     break;
  :: atomic {
       FREE(journal_lock[1]) -> journal_lock[1] = me; mine = 1;
     }
     break;
  od;
#ifndef NO_JOURNAL_CHECK
  if
  :: chunk_of[mine] != NONE ->
     c = chunk_of[mine];
     LOCK(c);
     chunk_lock[c] = NOBODY;
     MAY_DIE;
     chunk_of[mine] = NONE;
  :: else -> skip;
  fi;
#endif
  do
  :: i < CHUNKS ->
     c = (me + i) % CHUNKS;
     LOCK(c);
     MAY_DIE;
#ifdef TELL_FIRST
     chunk_of[mine] = c;
     PUBLISH(c, mine);
#endif
     draft[2 * mine] = home[2 * c] + 1;
     MAY_DIE;
     draft[2 * mine + 1] = home[2 * c + 1] + 1;
     MAY_DIE;
#ifdef HOME_FIRST
     BRING_HOME(c, mine);
#endif
#ifndef TELL_FIRST
     chunk_of[mine] = c;
     MAY_DIE;
     PUBLISH(c, mine);
     MAY_DIE;
#endif
#ifndef HOME_FIRST
     BRING_HOME(c, mine);
#endif
     state[c] = state[c] / PLACES * PLACES;
     MAY_DIE;
     chunk_of[mine] = NONE;
     chunk_lock[c] = NOBODY;
     i++;
  :: else -> break;
  od;
  journal_lock[mine] = NOBODY;
end:
  ended++;
}

proctype reader() {
  byte seen = 0, first = 0, second = 0, before = 0;
  before = FIRST(0) + told[0];
again:
  seen = state[0];
  if
  :: seen % PLACES == HOME -> first = home[0];
  :: else -> first = draft[2 * (seen % PLACES - 1)];
  fi;
  if
  :: seen % PLACES == HOME -> second = home[1];
  :: else -> second = draft[2 * (seen % PLACES - 1) + 1];
  fi;
#ifndef NO_SECOND_LOOK
  if
  :: state[0] != seen -> goto again;
  :: else -> skip;
  fi;
#endif
  assert(first == second);
  assert(first >= before);
  ended++;
}

proctype successor() {
  byte me = LAST, c = 0, from = 0;
  ended == WRITERS + 1;
  do
  :: c < CHUNKS ->
     LOCK(c);
     assert(home[2 * c] == FIRST(c) + told[c] && home[2 * c + 1] == FIRST(c) + told[c]);
     c++;
  :: else -> break;
  od;
end:
  skip;
}

init {
  byte i = 0;
  atomic {
    do
    :: i < CHUNKS ->
       chunk_lock[i] = NOBODY;
       home[2 * i] = FIRST(i);
       home[2 * i + 1] = FIRST(i);
       i++;
    :: else -> break;
    od;
    i = 0;
    do
    :: i < JOURNALS -> journal_lock[i] = NOBODY; chunk_of[i] = NONE; i++;
    :: else -> break;
    od;
    i = 0;
    do
    :: i < WRITERS -> run writer(i); i++;
    :: else -> break;
    od;
    run reader();
    run successor();
  }
}
