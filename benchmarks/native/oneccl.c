/* oneCCL's collectives, from the library that ../harness/peers.py makes. Owns the loading only. */
#include <dlfcn.h>

#include "worker.h"

static int (*peer_start)(Bench* b, FILE* facts);
static int (*peer_call)(Bench* b, int k);
static void (*peer_stop)(void);

static int start(Bench* b, const char* word, FILE* facts) {
  void* library = dlopen(word, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(b->why, sizeof b->why, "%s", dlerror());
    return 1;
  }
  peer_start = (int (*)(Bench*, FILE*))dlsym(library, "peer_start");
  peer_call = (int (*)(Bench*, int))dlsym(library, "peer_call");
  peer_stop = (void (*)(void))dlsym(library, "peer_stop");
  if (!peer_start || !peer_call || !peer_stop) {
    snprintf(b->why, sizeof b->why, "%s lacks a function", word);
    return 1;
  }
  return peer_start(b, facts);
}

static int call(Bench* b, int k) { return peer_call(b, k); }

static void stop(Bench* b) {
  (void)b;
  peer_stop();
}

const Contender kOneCcl = {.name = "oneccl",
                           .collectives = (1u << kCollectives) - 1,
                           .start = start,
                           .call = call,
                           .stop = stop};
