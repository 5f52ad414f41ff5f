/* The versioned C interface of libhsgd_core: two-level collectives on host memory.
 *
 * For the Python binding, the MPI interposer and C programs. Functions return HSGD_OK or a negative
 * code, and fill `err` (which may be NULL) with one line for the user. */
#ifndef HSGD_CORE_H_
#define HSGD_CORE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HSGD_ABI_VERSION 9
#define HSGD_API __attribute__((visibility("default")))

typedef struct hsgd_comm hsgd_comm;
typedef struct hsgd_process hsgd_process;

typedef enum hsgd_status {
  HSGD_OK = 0,
  HSGD_ERR_ARGUMENT = -1,  /* the caller's mistake; nothing was sent */
  HSGD_ERR_PEER_LOST = -2, /* a rank died; err->rank names it */
  HSGD_ERR_TIMEOUT = -3,   /* a deadline passed; err->rank names a late rank, or -1 */
  HSGD_ERR_SIGNATURE =
      -4, /* ranks called with different shapes, dtypes, ops or names; no data was mixed */
  HSGD_ERR_MEMORY = -5, /* not enough shared memory or address space */
  HSGD_ERR_SYSTEM = -6, /* another system call or MPI failed */
  HSGD_ERR_CLOSED = -7, /* the communicator was closed, or broken by an interrupt or a system call;
                           after a lost rank or a deadline, later calls return that code again */
  HSGD_ERR_INTERRUPTED = -8, /* options->interrupted ended the wait; the communicator is broken */
  HSGD_ERR_PENDING = -9,     /* hsgd_request_wait only: not done in time; it continues */
  HSGD_ERR_QUEUE_FULL = -10  /* notified windows only: no room in time */
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

/* One of two calls that do not match. */
typedef struct hsgd_side {
  int32_t rank;  /* as hsgd_error.rank */
  int32_t named; /* 1: the call had a name */
  char name[64]; /* its first 63 characters */
} hsgd_side;

typedef struct hsgd_error {
  int32_t code; /* hsgd_status */
  int32_t rank; /* the rank that the error is about, as options->rank_names calls it, or -1 */
  char message[1024];
  hsgd_side sides[2]; /* with HSGD_ERR_SIGNATURE only */
} hsgd_error;

/* Every field has a default (hsgd_options_default). All ranks must pass the same values, except
 * near_nic. */
typedef struct hsgd_options {
  uint32_t struct_bytes; /* sizeof(hsgd_options), for versioning */
  uint32_t nontemporal;  /* kind of store into shared memory: 0 ordinary, 1 non-temporal, 2 measured
                            at start-up and, on one node, later again; unless 0, large results skip
                            the caches, too */
  double timeout_s;      /* of one collective and of the set-up; <= 0 is refused */
  int64_t oneshot_bytes; /* on one node, up to this payload each rank reads the whole input of all
                            ranks; < 0: measured at start-up */
  int64_t chunk_bytes;   /* payload of one pipeline step inside a node; < 0: measured */
  uint64_t wire_oneshot_bytes; /* most bytes that a node sends of a payload that it sends whole:
                                  with N nodes, payloads up to 1 / (N - 1) of this, or, with several
                                  rounds, 1 / the number of messages that a node sends */
  uint64_t wire_chunk_bytes;   /* payload of one pipeline step with several nodes; 0: chosen for
                                  messages of a good size */
  uint32_t slots;              /* reused staging slots per rank, >= 3 */
  int32_t spin; /* iterations of busy waiting before yielding; < 0: chosen from cores and ranks */
  uint64_t min_bytes;  /* interposer: smaller payloads pass through to MPI */
  uint32_t report;     /* interposer: 1 prints a line of counters per rank at MPI_Finalize */
  uint32_t wire_dtype; /* format of float32 between nodes: HSGD_BFLOAT16 or HSGD_FLOAT16; 0
                          (HSGD_FLOAT32): unchanged. Payloads that are sent whole stay exact */
  uint32_t wire_radix; /* most nodes that exchange directly, from 2 to 64; more than 8 of them in
                          rounds, in groups of at most this size */
  uint32_t flat_ranks; /* up to so many ranks of a node, from 1 to 1024, poll one another; more
                          ranks are counted in groups, and each polls only its group */
  int32_t near_nic; /* only for this rank: number, from 1, of the nearest network adapter; 0: none;
                       < 0: ask the kernel. Ranks near an adapter exchange with other nodes first */
  /* NULL, or a function that a waiting rank calls about fifty times a second, in the waiting
   * thread. Nonzero ends the wait. Makes Ctrl-C work in languages that only note a signal. */
  int (*interrupted)(void);
  uint32_t timeout_given; /* 1: HSGD_TIMEOUT_S was set; not a setting of its own */
  /* NULL, or a function that one rank calls when a deadline passes; the ranks then wait for as long
   * again instead of failing. For callers that replace MPI, which has no deadlines. */
  void (*late)(const char* message);
  /* NULL, or a function that a waiting rank calls at each look, after it has polled for a moment.
   * It drives things that do not progress by themselves, such as MPI messages. Nonzero: there may
   * be more to do, so the rank yields its core but does not sleep, unless ranks outnumber cores. */
  int (*progress)(void);
  /* 0, or the kind of store that these ranks measured for an earlier communicator, so that this one
   * measures nothing: 1 ordinary, 2 non-temporal; on one node with its switch points and step in
   * oneshot_bytes, known_allreduce_bytes (0: as oneshot_bytes) and chunk_bytes. */
  uint32_t known_store;
  uint64_t known_allreduce_bytes;
  /* NULL, or the object that communicators of this process share; it must outlive them. Then each
   * watched process takes one descriptor in all, not one per communicator, and `hsgd status` sees
   * what these communicators do. */
  hsgd_process* process;
  uint64_t comm_id; /* 0, or an id of a communicator of several nodes, the same on all its ranks and
                       on no others; `hsgd status` uses it to group ranks */
  /* NULL: errors call the ranks of the communicator by their ranks in it. Otherwise by these
   * numbers, one per rank, from 0 and all different, which are copied. Only errors have them:
   * message, rank and sides; a refused argument is quoted as it was given. A shrunk communicator
   * keeps them, a part of a split one does not. */
  const int32_t* rank_names;
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
                        small collectives is measured for every sixteenth */
} hsgd_counters;

typedef struct hsgd_topology {
  int32_t rank, size;             /* world */
  int32_t local_rank, local_size; /* ranks that share this node's memory */
  int32_t node_rank, node_count;
  int32_t leaders;        /* local ranks per node that carry data between nodes; 0 on one node */
  int32_t nontemporal;    /* the kind of store chosen at start-up: 0 or 1 */
  uint64_t oneshot_bytes; /* switch point and step in use, for collectives on this node */
  uint64_t chunk_bytes;
  uint64_t
      allreduce_bytes; /* the same switch point for allreduces, where each rank reads all inputs */
} hsgd_topology;

/* Costs of an allreduce of one payload on each node, if all nodes have as many ranks. On one node
 * nothing measured is used. */
typedef struct hsgd_allreduce_plan {
  uint64_t memory_bytes; /* of the communicator on one node, for any payload: shared segments and
                            buffers of all leaders */
  uint64_t steps;        /* of the pipeline; 0: the payload is small and travels with the headers */
  uint64_t step_bytes;   /* of the payload in one step */
  int32_t leaders;       /* ranks of the node that carry data between nodes; 0 on one node */
  int32_t rounds;        /* between nodes until all have data of all; 0 on one node */
  int32_t messages;      /* messages that one leader sends in these rounds */
} hsgd_allreduce_plan;

/* Local. Returns NULL if out of memory. A forked child makes its own. */
HSGD_API hsgd_process* hsgd_process_create(void);
HSGD_API void hsgd_process_destroy(hsgd_process* process);
HSGD_API void hsgd_options_default(hsgd_options* options);
/* Fills defaults, then the HSGD_* variables (docs/configuration.md). HSGD_ERR_ARGUMENT names a
 * malformed variable. No other native code reads the environment. */
HSGD_API int hsgd_options_from_env(hsgd_options* options, hsgd_error* err);
HSGD_API size_t hsgd_dtype_bytes(hsgd_dtype dtype); /* 0 if unknown */
HSGD_API const char* hsgd_dtype_name(hsgd_dtype dtype);
HSGD_API const char* hsgd_op_name(hsgd_op op);
HSGD_API const char* hsgd_simd_name(void); /* "avx512", "avx2", "neon" or "plain" */
/* Resources of this process: cores by affinity and the quota of its cgroups, at least 1; memory
 * that its cgroups allow, UINT64_MAX if there is no limit. */
HSGD_API int hsgd_usable_cores(void);
HSGD_API uint64_t hsgd_memory_limit_bytes(void);

/* Local; needs no communicator and starts nothing. Plans a float32 sum of `bytes` bytes on `nodes`
 * nodes with `ranks_per_node` ranks each. The caller predicts the times. */
HSGD_API int hsgd_plan_allreduce(const hsgd_options* options, int nodes, int ranks_per_node,
                                 uint64_t bytes, hsgd_allreduce_plan* plan, hsgd_error* err);

/* Collective over the `size` processes of one node that pass the same `path`; rank 0 makes a UNIX
 * socket there, which is removed before this returns. Blocking, with options->timeout_s as
 * deadline. */
HSGD_API int hsgd_comm_create_local(const char* path, int rank, int size,
                                    const hsgd_options* options, hsgd_comm** comm, hsgd_error* err);

/* Local. Returns options->near_nic, or asks the kernel: the network adapter, from 1, near all
 * processors of this process; 0: none, or not known. */
HSGD_API int hsgd_near_nic(const hsgd_options* options);

/* Local. Unmaps the segments. Waits only for open requests, which it finishes (each has its
 * deadline). Peers that call more collectives than this rank did get HSGD_ERR_PEER_LOST; peers of
 * other nodes get it when the leaders of this node have left, or called a further collective, too.
 */
HSGD_API void hsgd_comm_destroy(hsgd_comm* comm);

HSGD_API void hsgd_comm_topology(const hsgd_comm* comm, hsgd_topology* topology);
/* Local. Returns how errors call a rank; see hsgd_options. */
HSGD_API int hsgd_comm_rank_name(const hsgd_comm* comm, int rank);
/* Local. Returns the node of a rank, as node_rank of its topology; -1 if there is no such rank. */
HSGD_API int hsgd_comm_node_of(const hsgd_comm* comm, int rank);
/* Local. For `hsgd status`: sets the names of the hosts of all nodes, separated by commas. One rank
 * of each node calls it. */
HSGD_API void hsgd_comm_tell_hosts(hsgd_comm* comm, const char* hosts);
/* Local. Returns an epoll descriptor that watches all connections to other nodes; -1 if there are
 * none except MPI's. A forked child must close the connections that it watches: otherwise other
 * nodes would not learn that this rank has died. */
HSGD_API int hsgd_comm_descriptor(const hsgd_comm* comm);
HSGD_API void hsgd_comm_counters(const hsgd_comm* comm, hsgd_counters* counters);

/* Time that this rank worked on something. Steps of several levels alternate, so in between it did
 * other work or waited. */
typedef struct hsgd_span {
  uint64_t begin_ns, end_ns; /* of CLOCK_MONOTONIC; 0: never */
  uint64_t busy_ns;          /* time worked between begin and end */
} hsgd_span;

/* Times of one collective on this rank. */
typedef struct hsgd_record {
  char name[64]; /* from the label; may be cut */
  uint64_t bytes;
  hsgd_span call; /* the whole call; the time that is not busy was spent waiting for other ranks */
  hsgd_span reduce; /* inside the node: inputs into shared memory, and sums */
  hsgd_span inter; /* between nodes, on ranks that carry data: from the first message to the last */
  hsgd_span gather; /* inside the node: results out of shared memory */
} hsgd_record;

/* Local; never waits. Sets the reason why this rank leaves, for the next hsgd_comm_leave or
 * hsgd_comm_destroy in this thread: other ranks get "rank 3 (pid 4112, node2) WORDS" instead of
 * "closed its communicator". Only the first 256 bytes are used. */
HSGD_API void hsgd_comm_explain_leaving(hsgd_comm* comm, const char* words);
/* Local; never waits. Tells the other ranks, as hsgd_comm_destroy would, that this rank calls no
 * more collectives; its own later collectives fail. Does nothing while another thread is in a
 * collective. */
HSGD_API void hsgd_comm_leave(hsgd_comm* comm);
/* Local; never blocks. Ends the waiting collective, in any thread, and all later ones as if they
 * were interrupted. */
HSGD_API void hsgd_comm_abort(hsgd_comm* comm);
/* Does the same, but they end as if `timeout_s`, above 0, had been their deadline: HSGD_ERR_TIMEOUT
 * names the rank that was waited for, on the other ranks, too. */
HSGD_API void hsgd_comm_expire(hsgd_comm* comm, double timeout_s);

/* Local; never blocks, from any thread. Asks all ranks to stop, for instance because a signal says
 * that the job's time is over: the next collectives of this rank tell the others, at no cost. */
HSGD_API void hsgd_comm_request_stop(hsgd_comm* comm);
/* Local; never blocks. Returns 1 if a rank had asked before it called a collective that has run
 * here, otherwise 0. After the same collectives the answer is the same on all ranks. */
HSGD_API int hsgd_comm_stop_requested(const hsgd_comm* comm);

/* Local. Keeps the last `capacity` records from the next collectives on; 0 deletes them and stops,
 * which is the default. */
HSGD_API void hsgd_comm_keep_records(hsgd_comm* comm, uint64_t capacity);
/* Local; never waits for a collective. Moves up to `capacity` records out, oldest first, and
 * returns their number. Failed collectives have no record; one whose ranks exchange sizes first has
 * two. */
HSGD_API uint64_t hsgd_comm_take_records(hsgd_comm* comm, hsgd_record* records, uint64_t capacity);

/* A caller's description of its data: compared between ranks and shown in SignatureMismatch. */
typedef struct hsgd_label {
  const char* name;     /* NULL: none; compared whole by hash, shown up to 63 characters */
  const int64_t* shape; /* `ndim` extents, or NULL: only the element count is compared */
  int32_t ndim;
} hsgd_label;

/* Collective, blocking. `in` and `out` hold `count` elements; they are the same address or do not
 * overlap. `label` may be NULL. Calls of several threads on one communicator run one at a time. */
HSGD_API int hsgd_comm_allreduce(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                                 hsgd_dtype dtype, hsgd_op op, const hsgd_label* label,
                                 hsgd_error* err);
HSGD_API int hsgd_comm_broadcast(hsgd_comm* comm, void* data, uint64_t count, hsgd_dtype dtype,
                                 int root, const hsgd_label* label, hsgd_error* err);
HSGD_API int hsgd_comm_barrier(hsgd_comm* comm, hsgd_error* err);

/* Memory that all ranks of a node can reach: allreduce on it needs no staging; nor do, on one node,
 * other collectives whose inputs lie there. Collective, blocking: `count` elements for each rank,
 * zeroed, page-aligned. The buffer lives until hsgd_buffer_free, which is local and may be called
 * after the communicator is gone. */
typedef struct hsgd_buffer hsgd_buffer;
HSGD_API int hsgd_comm_allocate(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype,
                                const hsgd_label* label, hsgd_buffer** buffer, hsgd_error* err);
/* Does the same, but makes one array of `count` elements, which all ranks of a node share. */
HSGD_API int hsgd_comm_allocate_shared(hsgd_comm* comm, uint64_t count, hsgd_dtype dtype,
                                       const hsgd_label* label, hsgd_buffer** buffer,
                                       hsgd_error* err);
HSGD_API void* hsgd_buffer_data(
    const hsgd_buffer* buffer); /* this rank's own array, or the node's */
HSGD_API void hsgd_buffer_free(hsgd_buffer* buffer);

/* Collective, blocking. `counts`: `size` entries, elements of each rank's block, the same on all
 * ranks. `in` holds all blocks in rank order; `out` gets this rank's block, combined over all
 * ranks: the same bits as from an allreduce. `out` may be this rank's block within `in`. */
HSGD_API int hsgd_comm_reduce_scatter(hsgd_comm* comm, const void* in, void* out,
                                      const uint64_t* counts, hsgd_dtype dtype, hsgd_op op,
                                      const hsgd_label* label, hsgd_error* err);
/* `in` holds this rank's block; `out` gets all blocks in rank order. `in` may be this rank's block
 * within `out`. An extent below 0 in the label's shape may differ between ranks. */
HSGD_API int hsgd_comm_allgather(hsgd_comm* comm, const void* in, void* out, const uint64_t* counts,
                                 hsgd_dtype dtype, const hsgd_label* label, hsgd_error* err);
/* `in` holds a block for each rank; `out` gets one from each, in rank order. send_counts[j] of rank
 * i must be equal to receive_counts[i] of rank j; `size` entries each. Buffers do not overlap. */
HSGD_API int hsgd_comm_alltoall(hsgd_comm* comm, const void* in, const uint64_t* send_counts,
                                void* out, const uint64_t* receive_counts, hsgd_dtype dtype,
                                const hsgd_label* label, hsgd_error* err);
/* --- any collective, now or asynchronously --- */

typedef enum hsgd_kind {
  HSGD_FUNCTION = -1, /* no collective: calls `function`, which may make collectives */
  HSGD_ALLREDUCE = 0,
  HSGD_BROADCAST = 1, /* in == out */
  HSGD_BARRIER = 2,
  HSGD_REDUCE_SCATTER = 3,
  HSGD_ALLGATHER = 4,
  HSGD_ALLTOALL = 5, /* `counts` to each rank, `receive_counts` from each */
  /* The same, if each rank knows only its own rows: `count` of them, or `counts` to each rank, with
   * `row_elements` elements each. The ranks exchange their numbers, then `place` returns the
   * address for the result. */
  HSGD_ALLGATHER_ROWS = 6,
  HSGD_ALLTOALL_ROWS = 7,
  HSGD_KIND_COUNT = 8
} hsgd_kind;

/* Returns the address for a result whose size only the ranks together know. `rows`: rows that each
 * rank gives to this one, one entry per rank. Called once, in the thread that executes the
 * collective; for a submitted call this is a thread of the core. On failure it fills `err` with a
 * status other than HSGD_OK: the call ends with that status, but not before the other ranks have
 * their result. */
typedef void* (*hsgd_place)(void* context, const uint64_t* rows, hsgd_error* err);

/* A function of the program that is executed between collectives: in the thread that waits for it
 * without a time limit, or in a thread of the core. What it calls on the communicator runs at once;
 * what it submits runs after it, before anything that was submitted meanwhile. So the order of
 * collectives is the same on all ranks, whenever the functions run. */
typedef void (*hsgd_function)(void* context);

/* One collective, or function. Fields that its kind does not use are ignored. */
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
  hsgd_function function;
  void* context; /* for `place` and `function`; must stay valid until the call is done */
} hsgd_call;

typedef struct hsgd_request hsgd_request;

/* Collective, blocking: does the same as the function of the kind. */
HSGD_API int hsgd_comm_run(hsgd_comm* comm, const hsgd_call* call, hsgd_error* err);

/* Collective; never blocks: checks the arguments and submits the call to the communicator's thread,
 * which the first submission starts. Submitted calls run in the order of submission, and a blocking
 * call runs after calls submitted before it. Label and counts are copied; the buffers must stay
 * unchanged until the request is done. After an error that breaks the communicator, the rest of the
 * queue fails like any later call. Refused in a forked child and, between nodes, if MPI was
 * initialized with less than MPI_THREAD_MULTIPLE. */
HSGD_API int hsgd_comm_start(hsgd_comm* comm, const hsgd_call* call, hsgd_request** request,
                             hsgd_error* err);

/* Local; never blocks. Returns nonzero if the collective has ended, with or without success. */
HSGD_API int hsgd_request_done(const hsgd_request* request);

/* Returns the result of the collective, also if called again; HSGD_ERR_PENDING if it has not ended
 * within `timeout_s`, if that is not negative. May be called after hsgd_comm_destroy. */
HSGD_API int hsgd_request_wait(hsgd_request* request, double timeout_s, hsgd_error* err);

/* Local. Does not stop the collective: its buffers are in use until it is done, or
 * hsgd_comm_destroy has returned. */
HSGD_API void hsgd_request_free(hsgd_request* request);

/* Collective over `comm`, which must have one node; blocking. Makes a communicator of the ranks
 * with the same `color`, ordered by key, then rank. *part is NULL if `color` is negative. If a rank
 * cannot take part, all ranks of its color get an error, and `comm` stays usable. `rank_names`: see
 * hsgd_options; of the part's ranks, or NULL. For several nodes: split the MPI communicator, then
 * call hsgd_mpi_comm_create. */
HSGD_API int hsgd_comm_split(hsgd_comm* comm, int color, int key, const int32_t* rank_names,
                             hsgd_comm** part, hsgd_error* err);

/* Collective over the ranks that are left after HSGD_ERR_PEER_LOST or HSGD_ERR_TIMEOUT; blocking.
 * Makes a new communicator of them, numbered in the old order. `comm` is broken afterwards and must
 * still be destroyed. Does not wait for ranks that ended. Waits up to `timeout_s` for living ranks;
 * those that did not call it get HSGD_ERR_CLOSED from every later call. All ranks that return
 * HSGD_OK have the same members. HSGD_ERR_ARGUMENT if the ranks span several nodes. */
HSGD_API int hsgd_comm_shrink(hsgd_comm* comm, double timeout_s, hsgd_comm** shrunk,
                              hsgd_error* err);

/* Local, no communication: out[i] = in[0][i] op in[1][i] op ... op in[inputs-1][i], left to right;
 * 16-bit floats accumulate in float32 and round once. `out` may be one of the inputs. For tests and
 * for callers with their own trees. */
HSGD_API int hsgd_reduce(const void* const* in, int inputs, void* out, uint64_t count,
                         hsgd_dtype dtype, hsgd_op op, hsgd_error* err);
/* Local. Copies data past the caches, for data that others will read, or that is not read soon: the
 * lines of `to` are not read from memory first. No overlap. */
HSGD_API void hsgd_stream_copy(void* to, const void* from, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif /* HSGD_CORE_H_ */
