/* The versioned C interface of libhsgd_core: two-level collectives on host memory.
 *
 * Owns nothing itself: it names the types, codes and functions that callers (the Python binding,
 * the MPI interposer, C programs) may use. It never mentions Python, torch or MPI. Functions return
 * HSGD_OK or a negative code and fill `err` (which may be NULL) with one line for the user.
 */
#ifndef HSGD_CORE_H_
#define HSGD_CORE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HSGD_ABI_VERSION 3
#define HSGD_API __attribute__((visibility("default")))

typedef struct hsgd_comm hsgd_comm;

typedef enum hsgd_status {
  HSGD_OK = 0,
  HSGD_ERR_ARGUMENT = -1,  /* caller's mistake, nothing was sent */
  HSGD_ERR_PEER_LOST = -2, /* a rank died; err->rank names it */
  HSGD_ERR_TIMEOUT = -3,   /* a deadline passed; err->rank names a rank that did not come, or -1 */
  HSGD_ERR_SIGNATURE =
      -4, /* ranks called with different shapes, dtypes, ops or names; no data was mixed */
  HSGD_ERR_MEMORY = -5,      /* shared memory or address space could not be had */
  HSGD_ERR_SYSTEM = -6,      /* another system call or MPI failed */
  HSGD_ERR_CLOSED = -7,      /* the communicator was closed, or broken by an earlier error */
  HSGD_ERR_INTERRUPTED = -8, /* options->interrupted said so; the communicator is broken */
  HSGD_ERR_PENDING = -9,     /* hsgd_request_wait only: not done in time, and goes on */
  HSGD_ERR_QUEUE_FULL = -10  /* hsgd_window_put_notify only: no room for it in time */
} hsgd_status;

typedef enum hsgd_dtype {
  HSGD_FLOAT32 = 0,
  HSGD_FLOAT64 = 1,
  HSGD_FLOAT16 = 2,
  HSGD_BFLOAT16 = 3,
  HSGD_INT8 = 4,
  HSGD_INT32 = 5,
  HSGD_INT64 = 6,
  HSGD_UINT8 = 7,
  HSGD_DTYPE_COUNT = 8
} hsgd_dtype;

typedef enum hsgd_op {
  HSGD_SUM = 0,
  HSGD_MEAN = 1, /* sum / world_size, floating dtypes only */
  HSGD_MIN = 2,
  HSGD_MAX = 3,
  HSGD_PROD = 4,
  HSGD_OP_COUNT = 5
} hsgd_op;

/* One of two calls that do not fit together. */
typedef struct hsgd_side {
  int32_t rank;
  int32_t named; /* 1: the call had a name */
  char name[64]; /* its first 63 characters */
} hsgd_side;

typedef struct hsgd_error {
  int32_t code; /* hsgd_status */
  int32_t rank; /* the world rank that the error is about, or -1 */
  char message[1024];
  hsgd_side sides[2]; /* with HSGD_ERR_SIGNATURE only */
} hsgd_error;

/* Every field has a default (hsgd_options_default); all ranks must pass the same values. */
typedef struct hsgd_options {
  uint32_t struct_bytes; /* sizeof(hsgd_options), for versioning */
  uint32_t nontemporal; /* kind of store into shared memory: 0 ordinary, 1 non-temporal, 2 measured,
                           at start-up and, on one node, later; unless 0, large results go past the
                           caches, too */
  double timeout_s;     /* of one collective and of the set-up; <= 0 is refused */
  int64_t oneshot_bytes; /* on one node, up to this payload each rank reads everybody's whole input;
                            < 0: measured at start-up */
  int64_t chunk_bytes;   /* payload of one pipeline step inside a node; < 0: measured */
  uint64_t wire_oneshot_bytes; /* the most that a node sends of a payload that it sends whole: with
                                  N nodes payloads up to 1 / (N - 1) of this go that way */
  uint64_t wire_chunk_bytes;   /* payload of one pipeline step when there are several nodes; 0: what
                                  makes messages of a good size */
  uint32_t slots;              /* recycled staging slots per rank, >= 3 */
  int32_t spin; /* iterations of busy waiting before yielding; < 0: chosen from cores and ranks */
  uint64_t min_bytes;  /* interposer: smaller payloads pass through to MPI */
  uint32_t report;     /* interposer: 1 prints a line of counters per rank at MPI_Finalize */
  uint32_t wire_dtype; /* float32 travels between nodes as this: HSGD_BFLOAT16 or HSGD_FLOAT16; 0
                          (HSGD_FLOAT32): as it is. Payloads that are sent whole stay exact */
  /* NULL, or what a waiting rank calls some fifty times a second, in the thread that waits: nonzero
   * ends the wait. So that Ctrl-C works in languages that only note a signal. */
  int (*interrupted)(void);
  uint32_t timeout_given; /* 1: HSGD_TIMEOUT_S was set; not a setting of its own */
  /* NULL, or what one rank tells when a deadline passes: the ranks then wait on, for as long again,
   * instead of failing. For callers that stand for MPI, which knows no deadlines. */
  void (*late)(const char* message);
  /* NULL, or what a rank that waits calls at each look, once it has polled for a moment: what makes
   * something go on that cannot by itself, such as messages of MPI. Nonzero: there may be more to
   * do, so that the rank yields its core but does not sleep, unless ranks outnumber cores. */
  int (*progress)(void);
  /* 0, or what these ranks measured when they made a communicator before, so that this one measures
   * nothing: 1 ordinary, 2 non-temporal stores; on one node with its switch point and step in
   * oneshot_bytes and chunk_bytes. */
  uint32_t known_store;
} hsgd_options;

/* Monotonic counters of one communicator on one rank. Bytes are payload bytes. */
typedef struct hsgd_counters {
  uint64_t calls;            /* collectives completed */
  uint64_t payload_bytes;    /* sum of count * itemsize over completed collectives */
  uint64_t intra_bytes;      /* bytes this rank read or wrote in shared memory for them */
  uint64_t inter_bytes_sent; /* bytes this rank sent to other nodes, headers included */
  uint64_t inter_bytes_received;
  uint64_t wait_ns;  /* time spent waiting for other ranks */
  uint64_t total_ns; /* time spent inside collectives, waiting included; on one node the work of
                        small ones is that of every sixteenth */
} hsgd_counters;

typedef struct hsgd_topology {
  int32_t rank, size;             /* world */
  int32_t local_rank, local_size; /* ranks that share this node's memory */
  int32_t node_rank, node_count;
  int32_t leaders;        /* local ranks per node that carry data between nodes; 0 on one node */
  int32_t nontemporal;    /* the kind of store chosen at start-up: 0 or 1 */
  uint64_t oneshot_bytes; /* the switch point and the step in use, for collectives on this node */
  uint64_t chunk_bytes;
} hsgd_topology;

HSGD_API uint32_t hsgd_abi_version(void);
HSGD_API void hsgd_options_default(hsgd_options* options);
/* Defaults, then the HSGD_* variables (docs/configuration.md). HSGD_ERR_ARGUMENT names a malformed
 * one. The only reader of the environment in the native code. */
HSGD_API int hsgd_options_from_env(hsgd_options* options, hsgd_error* err);
HSGD_API size_t hsgd_dtype_bytes(hsgd_dtype dtype); /* 0 if unknown */
HSGD_API const char* hsgd_dtype_name(hsgd_dtype dtype);
HSGD_API const char* hsgd_op_name(hsgd_op op);
HSGD_API const char* hsgd_simd_name(void); /* "avx512", "avx2" or "plain" */
/* What this process may use: cores by affinity and the quota of its cgroups, at least 1; the memory
 * that its cgroups allow, UINT64_MAX where they have no limit. */
HSGD_API int hsgd_usable_cores(void);
HSGD_API uint64_t hsgd_memory_limit_bytes(void);

/* Collective over the `size` processes of one node that pass the same `path` (a UNIX socket is made
 * there by rank 0 and removed before this returns). Blocking, with options->timeout_s as deadline.
 */
HSGD_API int hsgd_comm_create_local(const char* path, int rank, int size,
                                    const hsgd_options* options, hsgd_comm** comm, hsgd_error* err);

/* Local. Unmaps the segments. Waits for nobody, except for requests that are open, which it
 * finishes (each has its deadline). Peers that call more collectives than this rank did get
 * HSGD_ERR_PEER_LOST, those of other nodes when the leaders of this node have left, or called one,
 * too. */
HSGD_API void hsgd_comm_destroy(hsgd_comm* comm);

HSGD_API void hsgd_comm_topology(const hsgd_comm* comm, hsgd_topology* topology);
/* Local. The node of a rank, as node_rank of its topology; -1 where there is no such rank. */
HSGD_API int hsgd_comm_node_of(const hsgd_comm* comm, int rank);
HSGD_API void hsgd_comm_counters(const hsgd_comm* comm, hsgd_counters* counters);

/* When this rank worked on something: steps of several levels alternate, so that in between it did
 * other work, or waited. */
typedef struct hsgd_span {
  uint64_t begin_ns, end_ns; /* of CLOCK_MONOTONIC; 0: never */
  uint64_t busy_ns;          /* of that time */
} hsgd_span;

/* What one collective spent its time on, on this rank. */
typedef struct hsgd_record {
  char name[64]; /* of the label, perhaps cut */
  uint64_t bytes;
  hsgd_span call;   /* all of it; what is not busy was waiting for other ranks */
  hsgd_span reduce; /* inside the node: inputs into shared memory, and sums */
  hsgd_span inter; /* between nodes, on ranks that carry data: from the first message to the last */
  hsgd_span gather; /* inside the node: results out of shared memory */
} hsgd_record;

/* Local, never waits. Tells the other ranks, as destroying it would, that this one calls no
 * collective any more, and has its own fail. Does nothing while another thread is in a collective.
 */
HSGD_API void hsgd_comm_leave(hsgd_comm* comm);

/* Local. From the next collectives on the last `capacity` records are kept; 0 forgets them and
 * stops, which is how it begins. */
HSGD_API void hsgd_comm_keep_records(hsgd_comm* comm, uint64_t capacity);
/* Local, never waits for a collective. Moves up to `capacity` records out, oldest first, and
 * returns how many. Collectives that failed have none; one whose ranks tell one another sizes first
 * has two. */
HSGD_API uint64_t hsgd_comm_take_records(hsgd_comm* comm, hsgd_record* records, uint64_t capacity);

/* What a caller may say about its data: compared between ranks and shown in SignatureMismatch. */
typedef struct hsgd_label {
  const char* name;     /* NULL: none; compared whole by hash, shown up to 63 characters */
  const int64_t* shape; /* `ndim` extents, or NULL: only the element count is compared */
  int32_t ndim;
} hsgd_label;

/* Collective, blocking. `in` and `out` hold `count` elements; they are the same address or do not
 * overlap. `label` may be NULL. Calls of several threads on one communicator are served one at a
 * time. */
HSGD_API int hsgd_comm_allreduce(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                                 hsgd_dtype dtype, hsgd_op op, const hsgd_label* label,
                                 hsgd_error* err);
HSGD_API int hsgd_comm_broadcast(hsgd_comm* comm, void* data, uint64_t count, hsgd_dtype dtype,
                                 int root, const hsgd_label* label, hsgd_error* err);
HSGD_API int hsgd_comm_barrier(hsgd_comm* comm, hsgd_error* err);

/* Memory that all ranks of a node can reach: allreduce on it, and on one node the other collectives
 * whose inputs lie there, need no staging.
 * Collective, blocking: `count` elements for each rank, zeroed, page-aligned. The buffer lives
 * until hsgd_buffer_free, which is local, also after the communicator is gone. */
typedef struct hsgd_buffer hsgd_buffer;
HSGD_API int hsgd_comm_allocate(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype,
                                const hsgd_label* label, hsgd_buffer** buffer, hsgd_error* err);
/* The same, but one array of `count` elements for all ranks of a node, who see one memory. */
HSGD_API int hsgd_comm_allocate_shared(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype,
                                       const hsgd_label* label, hsgd_buffer** buffer,
                                       hsgd_error* err);
HSGD_API void* hsgd_buffer_data(
    const hsgd_buffer* buffer); /* this rank's own array, or the node's */
HSGD_API void hsgd_buffer_free(hsgd_buffer* buffer);

/* As above. `counts`: `size` entries, elements of the block of each rank, the same on all ranks.
 * `in` holds all blocks in rank order; `out` this rank's block, combined over all ranks: bit for
 * bit what an allreduce would give there. `out` may be this rank's block within `in`. */
HSGD_API int hsgd_comm_reduce_scatter(hsgd_comm* comm, const void* in, void* out,
                                      const uint64_t* counts, hsgd_dtype dtype, hsgd_op op,
                                      const hsgd_label* label, hsgd_error* err);
/* `in` holds this rank's block, `out` gets all blocks in rank order. `in` may be this rank's block
 * within `out`. An extent below 0 in the label's shape says that it may differ between ranks. */
HSGD_API int hsgd_comm_allgather(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                                 hsgd_dtype dtype, const hsgd_label* label, hsgd_error* err);
/* `in` holds a block for each rank, `out` gets one from each, in rank order. What rank i sends to
 * rank j, send_counts[j] of i, must be what j expects from it, receive_counts[i] of j; `size`
 * entries each. Buffers do not overlap. */
HSGD_API int hsgd_comm_alltoall(hsgd_comm* comm, const void* in, const uint64_t* send_counts,
                                void* out, const uint64_t* receive_counts, hsgd_dtype dtype,
                                const hsgd_label* label, hsgd_error* err);
/* --- any collective, now or asynchronously --- */

typedef enum hsgd_kind {
  HSGD_ALLREDUCE = 0,
  HSGD_BROADCAST = 1, /* in == out */
  HSGD_BARRIER = 2,
  HSGD_REDUCE_SCATTER = 3,
  HSGD_ALLGATHER = 4,
  HSGD_ALLTOALL = 5, /* `counts` to each rank, `receive_counts` from each */
  /* The same where each rank knows its own rows only: `count` of them, or `counts` to each rank, of
   * `row_elements` each. The ranks tell one another, then `place` says where the result goes. */
  HSGD_ALLGATHER_ROWS = 6,
  HSGD_ALLTOALL_ROWS = 7,
  HSGD_KIND_COUNT = 8
} hsgd_kind;

/* Where a result goes whose size only the ranks together know. `rows`: one entry per rank, of what
 * it gives to this one. Called once, in the thread that executes the collective, which is one of
 * the core's own when the call was submitted. Whoever cannot say fills `err` with a status other
 * than HSGD_OK: the call ends with that, but not before the other ranks have their result. */
typedef void* (*hsgd_place)(void* context, const uint64_t* rows, hsgd_error* err);

/* One collective. Fields that its kind does not use are ignored. */
typedef struct hsgd_call {
  hsgd_kind kind;
  const void* in;
  void* out;
  uint64_t count;
  const uint64_t* counts;         /* one per rank, or NULL */
  const uint64_t* receive_counts; /* one per rank, or NULL */
  hsgd_dtype dtype;
  hsgd_op op;
  int root;
  const hsgd_label* label; /* may be NULL */
  uint64_t row_elements;
  hsgd_place place;
  void* context; /* for `place`; stays until the collective is done */
} hsgd_call;

typedef struct hsgd_request hsgd_request;

/* Collective, blocking: what the function of the kind does. */
HSGD_API int hsgd_comm_run(hsgd_comm* comm, const hsgd_call* call, hsgd_error* err);

/* Collective, never blocks: checks the arguments and submits the call to the thread of the
 * communicator, which the first submission starts. Submitted calls are executed in the order of
 * submission, and a blocking call after those that were submitted before it. Label and counts are
 * copied; the buffers must stay as they are until the request is done. After an error that breaks
 * the communicator the rest of the queue fails like any later call. Refused in a forked child and,
 * between nodes, where MPI was initialized with less than MPI_THREAD_MULTIPLE. */
HSGD_API int hsgd_comm_start(hsgd_comm* comm, const hsgd_call* call, hsgd_request** request,
                             hsgd_error* err);

/* Local, never blocks: nonzero when the collective has ended, in whatever way. */
HSGD_API int hsgd_request_done(const hsgd_request* request);

/* Returns what the collective ended with, as often as it is asked; HSGD_ERR_PENDING when it has not
 * ended within `timeout_s`, if that is not negative. May be called after hsgd_comm_destroy. */
HSGD_API int hsgd_request_wait(hsgd_request* request, double timeout_s, hsgd_error* err);

/* Local. Does not stop the collective: its buffers are in use until it is done, or
 * hsgd_comm_destroy has returned. */
HSGD_API void hsgd_request_free(hsgd_request* request);

/* Collective over `comm`, which must have one node, blocking: a communicator of the ranks with the
 * same `color`, ordered by key, then rank. NULL in *part where `color` is negative. When a rank
 * cannot take part, all ranks of its color are told, and `comm` goes on. Over several nodes: split
 * the MPI communicator, then hsgd_mpi_comm_create. */
HSGD_API int hsgd_comm_split(hsgd_comm* comm, int color, int key, hsgd_comm** part,
                             hsgd_error* err);

/* Collective over the ranks that are left after HSGD_ERR_PEER_LOST or HSGD_ERR_TIMEOUT, blocking: a
 * new communicator of them, numbered in the old order. `comm` is broken afterwards and still to be
 * destroyed. Ranks that ended are not waited for. Ranks that live are waited for up to `timeout_s`;
 * those that did not come then get HSGD_ERR_CLOSED from whatever they call. All ranks that return
 * HSGD_OK have the same members. HSGD_ERR_ARGUMENT when the ranks span several nodes. */
HSGD_API int hsgd_comm_shrink(hsgd_comm* comm, double timeout_s, hsgd_comm** shrunk,
                              hsgd_error* err);

/* Local, no communication: out[i] = in[0][i] op in[1][i] op ... op in[inputs-1][i], left to right;
 * 16-bit floats accumulate in float32 and round once. `out` may be one of the inputs. For tests and
 * callers' own trees. */
HSGD_API int hsgd_reduce(const void* const* in, int inputs, void* out, uint64_t count,
                         hsgd_dtype dtype, hsgd_op op, hsgd_error* err);
/* Local: copies past the caches what others will read, or nobody soon: the lines of `to` are not
 * read from memory first. No overlap. */
HSGD_API void hsgd_stream_copy(void* to, const void* from, uint64_t bytes);

/* --- notified window: one-sided writes, without a barrier --- */

/* Each rank has a segment that all ranks may write into, and slots that tell it what was written.
 * A slot has one writer and holds the last version that it was notified of, 0 at the beginning. */
typedef struct hsgd_window hsgd_window;

typedef enum hsgd_network { HSGD_NETWORK_MPI = 0, HSGD_NETWORK_SOCKETS = 1 } hsgd_network;

/* The same on all ranks. */
typedef struct hsgd_window_options {
  uint32_t struct_bytes; /* sizeof(hsgd_window_options), for versioning */
  uint32_t slots;        /* of each rank */
  uint64_t segment_bytes;
  uint32_t queue;       /* operations to other nodes that may be under way */
  uint32_t remote_only; /* 1: writes inside the node take the network; for measurements, tests */
  double timeout_s;     /* until an operation that was not delivered breaks the window */
  uint32_t network;     /* hsgd_network */
  uint32_t forgiving;   /* 1: what a target does not take stays under way, or goes with the target
                         * where its death is known, and breaks nothing */
  uint64_t slice_bytes; /* over sockets: a write goes in slices of so many; the kernel is given up
                         * to four ahead of what it has sent */
} hsgd_window_options;

/* Bytes for the target's segment, at `offset` of it. */
typedef struct hsgd_piece {
  const void* data;
  uint64_t bytes;
  uint64_t offset;
} hsgd_piece;

/* Collective over the ranks of `comm`, blocking. Between nodes over sockets, if options->network
 * says so; over MPI: hsgd_mpi_window_create. Goes before `comm` is destroyed. */
HSGD_API int hsgd_window_create(hsgd_comm* comm, const hsgd_window_options* options,
                                hsgd_window** window, hsgd_error* err);
/* Local on one node; over MPI collective, and bounded by the deadline. */
HSGD_API void hsgd_window_destroy(hsgd_window* window);
/* Local, never blocks: hsgd_window_destroy will wait for nobody. Over MPI memory and window stay
 * until the process ends, and the other ranks wait in theirs up to the deadline. */
HSGD_API void hsgd_window_abandon(hsgd_window* window);
/* Local, never blocks: a hsgd_tree_run on it returns HSGD_ERR_CLOSED, now or when it begins. */
HSGD_API void hsgd_window_end_work(hsgd_window* window);
/* Local: the epoll descriptor that all its connections belong to, -1 if it has none. A child of
 * fork should close what /proc/self/fdinfo lists for it: while anybody has a connection, the other
 * side does not learn that this process ended. */
HSGD_API int hsgd_window_descriptor(const hsgd_window* window);

/* Local. Writes `count` pieces into the segment of `target`, and then `version` into its slot; the
 * target sees the version only with the data. `version` is above what this rank sent to the slot
 * before. Inside the node all is done on return, and *ticket is 0. Between nodes it goes on
 * whenever this rank is in a function of the window, and the data stays as it is until
 * hsgd_window_done; when the queue is full, waits up to `timeout_s` for room. `order`: over
 * sockets, of what waits for one target the least goes first; one for each slot. */
HSGD_API int hsgd_window_put_notify(hsgd_window* window, const hsgd_piece* pieces, uint64_t count,
                                    int target, uint32_t slot, uint64_t version, double timeout_s,
                                    uint32_t order, uint64_t* ticket, hsgd_error* err);
/* Local, never blocks: whether the operation was delivered. */
HSGD_API int hsgd_window_done(hsgd_window* window, uint64_t ticket, int* done, hsgd_error* err);
/* Blocks until everything this rank has put is delivered. */
HSGD_API int hsgd_window_drain(hsgd_window* window, double timeout_s, hsgd_error* err);
/* Blocks until a slot of this rank has a version above its entry of `seen`: the first such one, in
 * the order given. Up to 4 threads wait at a time. After HSGD_ERR_TIMEOUT it may be called again.
 */
HSGD_API int hsgd_window_wait_any(hsgd_window* window, const uint32_t* slots, const uint64_t* seen,
                                  uint64_t count, double timeout_s, uint32_t* slot,
                                  uint64_t* version, hsgd_error* err);
/* Local, never block: the version of a slot of this rank; reset makes it 0. */
HSGD_API int hsgd_window_test(hsgd_window* window, uint32_t slot, uint64_t* version,
                              hsgd_error* err);
HSGD_API int hsgd_window_reset(hsgd_window* window, uint32_t slot, uint64_t* version,
                               hsgd_error* err);
/* Local: only `source` will notify this slot. Errors name it, and its death ends a wait. */
HSGD_API int hsgd_window_bind(hsgd_window* window, uint32_t slot, int source, hsgd_error* err);
/* Local: where the segment of a rank of this node lies, and what keeps it there, for
 * hsgd_buffer_free; NULL: on another node. */
HSGD_API int hsgd_window_segment(hsgd_window* window, int rank, void** data, hsgd_buffer** memory,
                                 hsgd_error* err);

/* --- parameter box: float32 values in shared memory, found by a key --- */

/* Any process of the node and of the user may open the box of a key, at any time, and add to the
 * values while others read them. It lives as long as any process that opened it. Each change is
 * whole and exclusive per chunk, each read whole per chunk, whoever dies. */
typedef struct hsgd_box hsgd_box;

typedef struct hsgd_box_options {
  uint32_t struct_bytes; /* sizeof(hsgd_box_options), for versioning */
  uint32_t counters;     /* fetch-and-add counters, 0 at the beginning */
  uint64_t count;        /* values */
  uint64_t chunk_count;  /* values of a chunk */
} hsgd_box_options;

/* How long a call may wait, and what else may end it; see hsgd_options. */
typedef struct hsgd_patience {
  double timeout_s;
  int (*interrupted)(void);
} hsgd_patience;

/* Local. `initial` has `count` values, NULL: zeros. HSGD_ERR_ARGUMENT when the key is taken. */
HSGD_API int hsgd_box_create(const char* key, const hsgd_box_options* options, const float* initial,
                             hsgd_box** box, hsgd_error* err);
/* Blocks until somebody holds a box of this key; HSGD_ERR_TIMEOUT when nobody does. */
HSGD_API int hsgd_box_attach(const char* key, const hsgd_patience* patience, hsgd_box** box,
                             hsgd_error* err);
/* Local, waits for nobody. */
HSGD_API void hsgd_box_destroy(hsgd_box* box);
HSGD_API void hsgd_box_describe(const hsgd_box* box, hsgd_box_options* options);
HSGD_API uint64_t hsgd_box_version(const hsgd_box* box);    /* changes that were finished */
HSGD_API uint64_t hsgd_box_recoveries(const hsgd_box* box); /* locks taken from the dead */

/* `count` values from place `offset` on. They wait only for the lock of a chunk, which others keep
 * for microseconds: HSGD_ERR_TIMEOUT names who does not give it back. *version: how many changes
 * were finished before a read, or with a change, this one included. */
HSGD_API int hsgd_box_read(hsgd_box* box, float* out, uint64_t offset, uint64_t count,
                           const hsgd_patience* patience, uint64_t* version, hsgd_error* err);
/* `finishes`: 1, or 0 for a part of a change that another call finishes and counts. */
HSGD_API int hsgd_box_write(hsgd_box* box, const float* values, uint64_t offset, uint64_t count,
                            int finishes, const hsgd_patience* patience, uint64_t* version,
                            hsgd_error* err);
/* Adds `delta`, HSGD_FLOAT32 or HSGD_BFLOAT16. `sums`: `count` values, which become what the box
 * has then, each chunk as this has left it; NULL: nobody asks. */
HSGD_API int hsgd_box_accumulate(hsgd_box* box, const void* delta, hsgd_dtype dtype,
                                 uint64_t offset, uint64_t count, float* sums, int finishes,
                                 const hsgd_patience* patience, uint64_t* version, hsgd_error* err);
/* For a box that holds a copy of another node's: takes values as they were there at `stamp`, which
 * grows, and `version`; chunks that have later ones keep them. */
HSGD_API int hsgd_box_take_copy(hsgd_box* box, const float* values, uint64_t offset, uint64_t count,
                                uint64_t stamp, uint64_t version, const hsgd_patience* patience,
                                hsgd_error* err);
/* Local: HSGD_ERR_ARGUMENT, in the words of `what`, when the box has not these values. */
HSGD_API int hsgd_box_check(hsgd_box* box, const char* what, uint64_t offset, uint64_t count,
                            hsgd_error* err);

typedef struct hsgd_box_tensor {
  float* data;
  uint64_t count;
} hsgd_box_tensor;

/* Elastic averaging in one pass over the weights, which lie in the box one after another from place
 * 0: d = rate * (weight - centre), rounded to `dtype`; weight -= d; and delta = d, an array for all
 * of them, or, where `delta` is NULL, centre += d (float32). *squares: the sum of (weight -
 * centre)^2 before. */
HSGD_API int hsgd_box_elastic(hsgd_box* box, const hsgd_box_tensor* tensors, uint64_t count,
                              float rate, void* delta, hsgd_dtype dtype,
                              const hsgd_patience* patience, double* squares, uint64_t* version,
                              hsgd_error* err);
/* Local, never blocks: adds to a counter, *before is what it was. */
HSGD_API int hsgd_box_fetch_add(hsgd_box* box, uint32_t counter, int64_t value, int64_t* before,
                                hsgd_error* err);

/* What the trust ratio of a LARS step divides |weight| by. */
typedef enum hsgd_lars_norm {
  HSGD_LARS_GRADIENT = 0, /* |g| + weight_decay * |w| + eps */
  HSGD_LARS_DECAYED = 1,  /* |g + weight_decay * w| + eps */
  HSGD_LARS_UPDATE = 2    /* |what momentum makes of it| + eps */
} hsgd_lars_norm;

/* A form of LARS; see hsgd/optim/large_batch/lars.py. Flags are 0 or 1. */
typedef struct hsgd_lars_rule {
  double lr;
  double momentum;
  double weight_decay;
  double trust_coefficient;
  double eps;
  int32_t adapt;          /* 0: the ratio is 1, without a look at the norms */
  int32_t norm_of;        /* hsgd_lars_norm */
  int32_t lr_in_momentum; /* the buffer sums up lr * trust * g, not trust * g */
  int32_t clip;           /* the ratio becomes min(ratio / lr, 1) */
  int32_t plain_at_zero;  /* where a norm is 0: no decay either */
  int32_t nesterov;
} hsgd_lars_rule;

/* `count` float32 elements each, in the same order; buffer is NULL without momentum. `square` and
 * `sample` are what the last step on these weights left there: |weight|^2, and what a few elements
 * add up to. 0: not known. A square that is no longer that of the weights is noticed, and made up
 * for but for rounding; 0 after any write to the weights keeps the bits as well. */
typedef struct hsgd_lars_tensor {
  float* weight;
  const float* gradient;
  float* buffer;
  uint64_t count;
  double square;
  uint64_t sample;
} hsgd_lars_tensor;

/* Local, blocking, no communication: one step on all tensors, in place, by up to `threads` threads
 * of which the caller is one. The result does not depend on their number. */
HSGD_API int hsgd_lars_step(hsgd_lars_tensor* tensors, uint64_t count, const hsgd_lars_rule* rule,
                            int threads, hsgd_error* err);

/* --- layers that flow through a window: sums up one tree, weights down another --- */

/* A gradient block: the slot that tells of it, and where it lies. */
typedef struct hsgd_tree_input {
  uint32_t slot;
  int32_t memory;  /* the rank of this node in whose segment it lies */
  uint64_t offset; /* there */
} hsgd_tree_input;

typedef struct hsgd_tree_output {
  int32_t target;
  uint32_t slot;
  uint64_t offset; /* in the target's segment */
  uint64_t bytes;  /* 0: the target is only told */
} hsgd_tree_output;

typedef struct hsgd_tree_numbers {
  uint64_t place; /* within a gradient block, bytes */
  uint64_t count;
  hsgd_dtype dtype;
} hsgd_tree_numbers;

typedef struct hsgd_tree_layer {
  const hsgd_tree_numbers* numbers;
  const hsgd_tree_input*
      gradients;                /* added in this order; the sum lies in the first, this rank's */
  const hsgd_tree_output* up;   /* of the sum; none: it becomes weights here */
  const hsgd_tree_output* down; /* of the weights, in the order in which they go */
  uint32_t number_count, gradient_count, up_count, down_count;
  uint32_t flags; /* bytes at the beginning of a block, which a sum has of all by `or` */
  hsgd_tree_input weights;
} hsgd_tree_layer;

typedef struct hsgd_tree_options {
  uint32_t struct_bytes; /* sizeof(hsgd_tree_options), for versioning */
  uint32_t layer_count;
  const hsgd_tree_layer* layers; /* what is needed first comes first */
  double divisor;                /* of sums that become weights here */
  uint32_t whole_step;           /* 1: weights are made of all layers at once */
  uint32_t stop_slot;            /* any version there ends hsgd_tree_run */
  uint64_t given_up;             /* versions from here on, in any slot: another rank gave up */
  uint64_t reason_bytes;         /* at the beginning of this rank's segment: why, in words */
} hsgd_tree_options;

typedef struct hsgd_tree hsgd_tree;
/* Makes weights of the sums of these layers, in place, in the thread of hsgd_tree_run. Nonzero: it
 * could not, and the tree ends. */
typedef int (*hsgd_tree_update)(void* context, uint64_t version, const uint32_t* layers,
                                uint32_t count);

/* Local. Everything is copied. `window` stays until hsgd_tree_destroy. */
HSGD_API int hsgd_tree_create(hsgd_window* window, const hsgd_tree_options* options,
                              hsgd_tree** tree, hsgd_error* err);
HSGD_API void hsgd_tree_destroy(hsgd_tree* tree);
/* Local, blocks until the stop slot is notified: sums, updates and forwards what comes. One thread
 * at a time. HSGD_ERR_PEER_LOST: another rank gave up, or one of this node died. */
HSGD_API int hsgd_tree_run(hsgd_tree* tree, hsgd_tree_update update, void* context,
                           hsgd_error* err);

/* The parameter of one entry of a layer's `numbers`, float32 elements in the same order. */
typedef struct hsgd_tree_tensor {
  float* weight;  /* NULL: `update` shall be called when it has a gradient */
  float* buffer;  /* of the momentum; NULL: there is none yet */
  uint32_t group; /* whose rule it follows */
} hsgd_tree_tensor;

/* These three let a root make weights by SGD itself, with no call of `update`: for a layer whose
 * tensors it was told, in a step whose rules it was told, and where no buffer is missing. For any
 * thread, never block for long.
 * set_tensors: one for each of the layer's `numbers`; they stay until forget_tensors has returned.
 * set_rules: one for each group, without `adapt`; before this rank tells of its first gradient of
 * that version. */
HSGD_API int hsgd_tree_set_tensors(hsgd_tree* tree, uint32_t layer, const hsgd_tree_tensor* tensors,
                                   uint32_t count, hsgd_error* err);
HSGD_API void hsgd_tree_forget_tensors(hsgd_tree* tree);
HSGD_API int hsgd_tree_set_rules(hsgd_tree* tree, uint64_t version, const hsgd_lars_rule* rules,
                                 uint32_t count, hsgd_error* err);

/* Something that went to another node: when it was given to the network, and when it was known to
 * have arrived, nanoseconds of CLOCK_MONOTONIC. */
typedef struct hsgd_tree_sent {
  uint32_t layer;
  int32_t target;
  int64_t begin_ns, end_ns;
} hsgd_tree_sent;
/* Local, never blocks, for any thread: the last of them, the oldest first, as many as fit. Returns
 * their number. */
HSGD_API uint32_t hsgd_tree_last_sent(const hsgd_tree* tree, hsgd_tree_sent* sent,
                                      uint32_t capacity);

/* `rows` rows of `length` float32 elements at two places: in `last` they follow one another, in
 * `now` each begins `stride` elements after the one before. */
typedef struct hsgd_change_part {
  const float* now;
  const float* last;
  uint64_t rows;
  uint64_t length;
  uint64_t stride;
  double weight; /* of each element */
} hsgd_change_part;

/* Local, no communication, never fails: the sum over parts of weight * |now - last|^2, in one pass
 * over both. The result does not depend on the instruction set. */
HSGD_API double hsgd_change_square(const hsgd_change_part* parts, uint64_t count);

#ifdef __cplusplus
}
#endif
#endif /* HSGD_CORE_H_ */
