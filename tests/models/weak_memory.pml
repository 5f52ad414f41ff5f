/* Memory as processors with weak ordering show it (ARMv8: Arm ARM, section B2.3), for the models that
 * include this. Before it they define PROCESSES, PLACES and ME, the number of the running process.
 *
 * Stores of a process reach memory late and in any order, but in order at one place; a release reaches
 * it after all stores before it. A plain load may have taken place at any time since the last acquire
 * or fence of its process: it gets any value that the place has had since (coherence is not modelled:
 * two loads of one place may see an old value last). A sequentially consistent load waits for the
 * releases before it (as LDAR after STLR), a fence for all stores. What is stored is seen by all others
 * at once, as in ARMv8. Loads never take place late: where a store may be seen before loads that come
 * before it, models store earlier. Values are 0 to 4.
 */
#define NONE 255
#define AT(place) (ME * PLACES + (place))

byte memory[PLACES];
byte possible[PROCESSES * PLACES] = 1;  /* what a plain load may get, a bit for each value */
byte stored[PROCESSES * PLACES] = NONE; /* not in memory yet */
byte release_at[PROCESSES] = NONE;      /* a release that is not in memory yet */
short before_release[PROCESSES];        /* places of stores that come first, a bit for each */
short left[PROCESSES];                  /* places of all stores that are not in memory */

inline plain_store(place, value) {
  atomic {
    stored[AT(place)] == NONE; /* one at a time at one place */
    stored[AT(place)] = value;
    left[ME] = left[ME] | (1 << (place));
  }
}

inline release(place, value) {
  atomic {
    stored[AT(place)] == NONE && release_at[ME] == NONE;
    before_release[ME] = left[ME];
    release_at[ME] = place;
    stored[AT(place)] = value;
    left[ME] = left[ME] | (1 << (place));
  }
}

inline look_again(i) {
  i = 0;
  do
  :: i < PLACES -> possible[AT(i)] = 1 << memory[i]; i++;
  :: else -> i = 0; break;
  od
}

inline write(place, value, i) { /* to memory, where all see it */
  memory[place] = value;
  i = 0;
  do
  :: i < PROCESSES -> possible[i * PLACES + (place)] = possible[i * PLACES + (place)] | (1 << (value)); i++;
  :: else -> i = 0; break;
  od
}

inline value_at(place, value) {
  if
  :: stored[AT(place)] != NONE -> value = stored[AT(place)];
  :: else -> value = memory[place];
  fi
}

inline plain_load(place, value) {
  atomic {
    if
    :: stored[AT(place)] != NONE -> value = stored[AT(place)];
    :: else ->
       if
       :: possible[AT(place)] & 1 -> value = 0;
       :: possible[AT(place)] & 2 -> value = 1;
       :: possible[AT(place)] & 4 -> value = 2;
       :: possible[AT(place)] & 8 -> value = 3;
       :: possible[AT(place)] & 16 -> value = 4;
       fi
    fi
  }
}

inline acquire(place, value, i) {
  atomic { value_at(place, value); look_again(i); }
}

inline acquire_in_order(place, value, i) { /* memory_order_seq_cst */
  atomic { release_at[ME] == NONE; value_at(place, value); look_again(i); }
}

inline fence(i) { /* memory_order_seq_cst */
  atomic { left[ME] == 0; look_again(i); }
}

/* memory_order_acq_rel, seen by all at once: where later loads may pass it, models store instead */
inline add(place, more, value, i) {
  atomic {
    left[ME] == 0;
    value = memory[place] + (more);
    write(place, value, i);
    look_again(i);
  }
}

inline plain_add(place, more, value, i) { /* memory_order_relaxed */
  atomic { value = memory[place] + (more); write(place, value, i); }
}

/* Brings stores to memory. */
active proctype processor() {
  byte who, place, i;
end:
  do
  :: atomic {
       (left[0] | left[PROCESSES / 2] | left[PROCESSES - 1]) != 0; /* 2 or 3 processes */
       select(who : 0 .. PROCESSES - 1);
       select(place : 0 .. PLACES - 1);
       if
       :: stored[who * PLACES + place] != NONE &&
            (release_at[who] != place || before_release[who] == 0) ->
            write(place, stored[who * PLACES + place], i);
            stored[who * PLACES + place] = NONE;
            left[who] = left[who] & ~(1 << place);
            before_release[who] = before_release[who] & ~(1 << place);
            if
            :: release_at[who] == place -> release_at[who] = NONE;
            :: else -> skip;
            fi
       :: else -> skip;
       fi;
       who = 0;
       place = 0;
     }
  od
}
