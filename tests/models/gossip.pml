/* Averaging in pairs, as hsgd.optim.pairs does it: both sides apply their half, or neither.
 *
 * Each rank asks, looks for answers and answers others, in any order, and leaves when its own
 * requests are closed. One lane for each rank. Checked: when all have left the sum of the weights is
 * the one at the beginning; nobody waits for ever; of two requests that crossed one at most is
 * committed, since both together would swap weights instead of averaging them.
 *
 * NO_TIE, NO_STAMP, NOTIFY_FIRST, FORGETFUL_GONE and GIVE_UP take one rule away each, and must fail.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ASKS
#define ASKS 2
#endif
#define AT(owner, other) ((owner) * RANKS + (other))
#define GONE 64
#define NOBODY RANKS

int weight[RANKS];
int lane[RANKS];                    /* of the asker; the asked writes its half there */
byte request[RANKS * RANKS];        /* slot at the owner, of the other: number */
byte stamp[RANKS * RANKS];          /* with it: how many of the owner's were answered before */
byte answer[RANKS * RANKS];         /* slot at the owner, of the other: 2 * number + committed */
byte finished = 0;
bool crossed[RANKS];                /* answered the one whom it has asked itself */

proctype rank(byte me) {
  byte asked[RANKS], seen[RANKS], told[RANKS], mixed[RANKS];
  byte open = NOBODY, asks = 0, peer = 0, known = 0;
  bool gone = false, committed = false;

#define COLLECT                                                                     \
  if                                                                                \
  :: open != NOBODY ->                                                              \
     known = answer[AT(me, open)];                                                  \
     gone = known >= GONE;                                                          \
     known = known % GONE;                                                          \
     if                                                                             \
     :: known / 2 == asked[open] && known % 2 ->                                    \
        assert(!crossed[me]);                                                       \
        weight[me] = weight[me] - lane[me];                                         \
        open = NOBODY;                                                              \
     :: (known / 2 == asked[open] && !(known % 2)) || (known / 2 != asked[open] && gone) -> \
        mixed[open] = 0;                                                            \
        open = NOBODY;                                                              \
     :: else -> skip;                                                               \
     fi                                                                             \
  :: else -> skip;                                                                  \
  fi

  do
  :: asks < ASKS && open == NOBODY ->
     /* to anybody */
     select(peer : 0 .. RANKS - 1);
     if
     :: peer != me && answer[AT(me, peer)] < GONE ->
        lane[me] = weight[me];
        crossed[me] = false;
        asked[peer]++;
        asks++;
        mixed[peer] = asked[peer];
        open = peer;
        d_step {
          stamp[AT(peer, me)] = told[peer] / 2;
          request[AT(peer, me)] = asked[peer];
        }
     :: else -> asks++;
     fi
  :: open != NOBODY -> COLLECT;
  :: true -> /* answer one */
     select(peer : 0 .. RANKS - 1);
     if
     :: peer != me && request[AT(me, peer)] > seen[peer] ->
        seen[peer] = request[AT(me, peer)];
        if
        :: open == peer -> COLLECT;
        :: else -> skip;
        fi;
        committed = true;
#ifndef NO_TIE
        if
#ifndef NO_STAMP
        :: me < peer && stamp[AT(me, peer)] < mixed[peer] -> committed = false;
#else
        :: me < peer && open == peer -> committed = false;
#endif
        :: else -> skip;
        fi;
#endif
        if
        :: committed ->
           lane[peer] = (lane[peer] - weight[me]) / 2;
           crossed[me] = crossed[me] || open == peer;
#ifndef NOTIFY_FIRST
           weight[me] = weight[me] + lane[peer];
#endif
        :: else -> skip;
        fi;
        told[peer] = 2 * seen[peer] + committed;
        answer[AT(peer, me)] = told[peer];
#ifdef NOTIFY_FIRST
        if
        :: committed -> weight[me] = weight[me] + lane[peer];
        :: else -> skip;
        fi;
#endif
     :: else -> skip;
     fi
#ifdef GIVE_UP
  :: open != NOBODY -> open = NOBODY; /* the answer may be on its way */
#endif
  :: asks == ASKS && open == NOBODY -> break;
  od;
  peer = 0;
  do
  :: peer < RANKS ->
     if
#ifdef FORGETFUL_GONE
     :: peer != me -> answer[AT(peer, me)] = GONE;
#else
     :: peer != me -> answer[AT(peer, me)] = GONE + told[peer];
#endif
     :: else -> skip;
     fi;
     peer++;
  :: else -> break;
  od;
  finished++;
}

init {
  byte each = 0;
  int sum = 0;
  atomic {
    do
    :: each < RANKS -> weight[each] = 5 * each * each; run rank(each); each++;
    :: else -> break;
    od;
  }
  finished == RANKS;
  d_step {
    each = 0;
    do
    :: each < RANKS -> sum = sum + weight[each] - 5 * each * each; each++;
    :: else -> break;
    od;
  }
  assert(sum == 0);
}
