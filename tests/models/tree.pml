/* The version flow control of hsgd.optim.NotifiedTree, for one layer.
 *
 *   root --- node --- leaf     gradients go up, weights go down; each place holds one version
 *
 * Memory is modelled as two halves, because a write that overlaps a read shows a mixture. Checked:
 * who reads a gradient reads the step that the slot promised, in both halves; who computes with
 * weights, or passes them on, sees one version throughout; nobody waits for ever.
 *
 * Two rules make that so. EAGER_GRADIENT and EAGER_WEIGHTS take one of them away each, and must
 * fail; OLD_NOTIFICATION notifies before the data is there, COUNTS sends "one more" in place of a
 * version, over a network that may deliver two notifications as one: they must fail as well.
 */
#ifndef STEPS
#define STEPS 3
#endif
#define ROOT 0
#define NODE 1
#define LEAF 2
#define RANKS 3
#define CHILD(rank) ((rank) + 1)
#define PARENT(rank) ((rank) - 1)

/* of each rank */
byte inbox_low[RANKS], inbox_high[RANKS];     /* the child's gradient, written by the child */
byte weights_low[RANKS], weights_high[RANKS]; /* written by the parent */
byte gradient_slot[RANKS];                    /* notified by the child */
byte weights_slot[RANKS];                     /* notified by the parent, by the root itself */
byte finished = 0;

inline notify(slot, version) {
#ifdef COUNTS
  if
  :: slot = slot + 1;
  :: skip; /* overwritten by the next before anybody looked */
  fi
#else
  slot = version;
#endif
}

inline write_gradient(to, version) {
#ifdef OLD_NOTIFICATION
  notify(gradient_slot[to], version);
#endif
  inbox_low[to] = version;
  inbox_high[to] = version;
#ifndef OLD_NOTIFICATION
  notify(gradient_slot[to], version);
#endif
}

inline write_weights(to, version) {
  weights_low[to] = version;
  weights_high[to] = version;
  notify(weights_slot[to], version);
}

/* The engine's part: with the own gradient and the child's, upwards. */
inline read_inbox(rank, version) {
  gradient_slot[rank] >= version;
  assert(inbox_low[rank] == version);
  assert(inbox_high[rank] == version);
}

active proctype root() {
  byte step = 1;
  do
  :: step > STEPS -> break;
  :: else ->
#ifndef EAGER_WEIGHTS
     read_inbox(ROOT, step);
#else
     gradient_slot[ROOT] >= step - 1; /* does not wait for the last */
#endif
     weights_low[ROOT] = step;
     weights_high[ROOT] = step;
     write_weights(CHILD(ROOT), step);
     step++;
  od;
  finished++;
}

/* A rank computes with the weights of step - 1 until it sends the gradient that it makes of them. */
inline compute(rank, version) {
  assert(weights_low[rank] == version);
  assert(weights_high[rank] == version);
}

active proctype node() {
  byte step = 1;
  do
  :: step > STEPS -> break;
  :: else ->
#ifndef EAGER_GRADIENT
     weights_slot[NODE] >= step - 1;
     compute(NODE, step - 1);
#endif
     read_inbox(NODE, step);
#ifndef EAGER_GRADIENT
     compute(NODE, step - 1);
#endif
     write_gradient(PARENT(NODE), step);
     step++;
  od;
  finished++;
}

active proctype forwarder() { /* the node's engine: weights go on to the leaf */
  byte step = 1;
  do
  :: step > STEPS -> break;
  :: else ->
     weights_slot[NODE] >= step;
     compute(NODE, step);
     weights_low[LEAF] = weights_low[NODE]; /* the write reads as it goes */
     weights_high[LEAF] = weights_high[NODE];
     assert(weights_low[LEAF] == step && weights_high[LEAF] == step);
     notify(weights_slot[LEAF], step);
     step++;
  od;
  finished++;
}

active proctype leaf() {
  byte step = 1;
  do
  :: step > STEPS -> break;
  :: else ->
#ifndef EAGER_GRADIENT
     weights_slot[LEAF] >= step - 1;
     compute(LEAF, step - 1);
#endif
     write_gradient(PARENT(LEAF), step);
     step++;
  od;
  finished++;
}

active proctype everybody_ends() {
  finished == 4;
}
