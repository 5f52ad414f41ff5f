/* Averaging in pairs, as hsgd.optim.pairs does it: both sides apply their half, or neither.
 *
 * Each rank asks, looks for answers and answers others, in any order, and leaves when its own
 * requests are closed. One lane for each rank. Checked: when all have left the sum of the weights is
 * the one at the beginning; nobody waits for ever; two requests that crossed do not swap weights
 * instead of averaging them. Inside a node one of such two is committed at most; with NETWORK, as
 * between nodes, both ranks apply the half of the difference of what they sent, once.
 *
 * NO_TIE, NO_STAMP, NOTIFY_FIRST, FORGETFUL_GONE and GIVE_UP take one rule away each, and with
 * NETWORK so do ANSWER_BOTH, CLOSE_EARLY and TELL_FIRST; all must fail.
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
#define REFUSED 0
#define COMMITTED 1
#define CROSSED 2
#define ANSWERS 4

int weight[RANKS];
int lane[RANKS];                    /* of the asker; the asked writes its half there */
byte request[RANKS * RANKS];        /* slot at the owner, of the other: number */
byte stamp[RANKS * RANKS];          /* with it: how many of the owner's were answered before */
byte answer[RANKS * RANKS];         /* slot at the owner, of the other: ANSWERS * number + kind */
byte finished = 0;
bool crossed[RANKS];                /* answered the one whom it has asked itself */

proctype rank(byte me) {
  byte asked[RANKS], seen[RANKS], told[RANKS], mixed[RANKS];
  byte open = NOBODY, asks = 0, peer = 0, known = 0, kind = 0;
  bool gone = false, halved = false; /* halved: the open request crossed, and has its half */

#define CLOSE                                                                       \
  halved = false;                                                                   \
  open = NOBODY

#define COLLECT                                                                     \
  if                                                                                \
  :: open != NOBODY ->                                                              \
     known = answer[AT(me, open)];                                                  \
     gone = known >= GONE;                                                          \
     known = known % GONE;                                                          \
     if                                                                             \
     :: halved && (known / ANSWERS == asked[open] || gone) -> CLOSE;                \
     :: !halved && known / ANSWERS == asked[open] && known % ANSWERS == COMMITTED -> \
        assert(!crossed[me]);                                                       \
        weight[me] = weight[me] - lane[me];                                         \
        CLOSE;                                                                      \
     :: !halved && known / ANSWERS == asked[open] && known % ANSWERS == CROSSED ->  \
        assert(!crossed[me] && request[AT(me, open)] > seen[open]);                 \
        seen[open] = request[AT(me, open)];                                         \
        told[open] = ANSWERS * seen[open] + CROSSED;                                \
        TAKE_AND_TELL;                                                              \
        CLOSE;                                                                      \
     :: !halved && ((known / ANSWERS == asked[open] && known % ANSWERS == REFUSED)  \
                    || (known / ANSWERS != asked[open] && gone)) ->                 \
        mixed[open] = 0;                                                            \
        CLOSE;                                                                      \
     :: else -> skip;                                                               \
     fi                                                                             \
  :: else -> skip;                                                                  \
  fi

#ifndef TELL_FIRST
#define TAKE_AND_TELL                                                               \
  weight[me] = weight[me] - (lane[me] - lane[open]) / 2;                            \
  answer[AT(open, me)] = told[open]
#else
#define TAKE_AND_TELL                                                               \
  answer[AT(open, me)] = told[open];                                                \
  weight[me] = weight[me] - (lane[me] - lane[open]) / 2
#endif

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
          stamp[AT(peer, me)] = told[peer] / ANSWERS;
          request[AT(peer, me)] = asked[peer];
        }
     :: else -> asks++;
     fi
  :: open != NOBODY -> COLLECT;
  :: true -> /* answer one */
     select(peer : 0 .. RANKS - 1);
     if
     :: peer != me && request[AT(me, peer)] > seen[peer] ->
        if
        :: open == peer -> COLLECT;
        :: else -> skip;
        fi;
        if
        :: request[AT(me, peer)] <= seen[peer] -> skip; /* it crossed, and is done */
#if defined(NETWORK) && !defined(ANSWER_BOTH)
        :: (request[AT(me, peer)] > seen[peer] && me < peer && open == peer &&
            stamp[AT(me, peer)] < mixed[peer]) -> skip; /* the answer to the open one is for both */
#endif
        :: else ->
           seen[peer] = request[AT(me, peer)];
           kind = COMMITTED;
#ifndef NETWORK
#ifndef NO_TIE
           if
#ifndef NO_STAMP
           :: me < peer && stamp[AT(me, peer)] < mixed[peer] -> kind = REFUSED;
#else
           :: me < peer && open == peer -> kind = REFUSED;
#endif
           :: else -> skip;
           fi;
#endif
#else
           if
           :: me > peer && open == peer && stamp[AT(me, peer)] < asked[peer] -> kind = CROSSED;
           :: else -> skip;
           fi;
#endif
           if
           :: kind == COMMITTED ->
              lane[peer] = (lane[peer] - weight[me]) / 2;
              crossed[me] = crossed[me] || open == peer;
#ifndef NOTIFY_FIRST
              weight[me] = weight[me] + lane[peer];
#endif
           :: kind == CROSSED ->
              weight[me] = weight[me] + (lane[peer] - lane[me]) / 2;
#ifndef CLOSE_EARLY
              halved = true;
#else
              open = NOBODY; /* and the lane may be written again */
#endif
           :: else -> skip;
           fi;
           told[peer] = ANSWERS * seen[peer] + kind;
           answer[AT(peer, me)] = told[peer];
#ifdef NOTIFY_FIRST
           if
           :: kind == COMMITTED -> weight[me] = weight[me] + lane[peer];
           :: else -> skip;
           fi;
#endif
        fi
     :: else -> skip;
     fi
#ifdef GIVE_UP
  :: open != NOBODY -> CLOSE; /* the answer may be on its way */
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
