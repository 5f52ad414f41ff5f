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

#define HSGD_ABI_VERSION 8
#define HSGD_API __attribute__((visibility("default")))

typedef struct hsgd_comm hsgd_comm;
typedef struct hsgd_process hsgd_process;

typedef enum hsgd_status {
  HSGD_OK = 0,
  HSGD_ERR_ARGUMENT = -1,  /* caller's mistake, nothing was sent */
  HSGD_ERR_PEER_LOST = -2, /* a rank died; err->rank names it */
  HSGD_ERR_TIMEOUT = -3,   /* a deadline passed; err->rank names a late rank, or -1 */
  HSGD_ERR_SIGNATURE =
      -4, /* ranks called with different shapes, dtypes, ops or names; no data was mixed */
  HSGD_ERR_MEMORY = -5, /* shared memory or address space could not be had */
  HSGD_ERR_SYSTEM = -6, /* another system call or MPI failed */
  HSGD_ERR_CLOSED = -7, /* the communicator was closed, or broken by an interrupt or a system call;
                         broken by a lost rank or a deadline, later calls give that code again */
  HSGD_ERR_INTERRUPTED = -8, /* options->interrupted said so; the communicator is broken */
  HSGD_ERR_PENDING = -9,     /* hsgd_request_wait only: not done in time, and goes on */
  HSGD_ERR_QUEUE_FULL = -10  /* of a notified window only: no room in time */
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

/* Every field has a default (hsgd_options_default); all ranks must pass the same values but for
 * near_nic. */
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
                                  N nodes payloads up to 1 / (N - 1) of this go that way, or up to
                                  1 / as many messages as a node sends in several rounds */
  uint64_t wire_chunk_bytes;   /* payload of one pipeline step when there are several nodes; 0: what
                                  makes messages of a good size */
  uint32_t slots;              /* recycled staging slots per rank, >= 3 */
  int32_t spin; /* iterations of busy waiting before yielding; < 0: chosen from cores and ranks */
  uint64_t min_bytes;  /* interposer: smaller payloads pass through to MPI */
  uint32_t report;     /* interposer: 1 prints a line of counters per rank at MPI_Finalize */
  uint32_t wire_dtype; /* float32 travels between nodes as this: HSGD_BFLOAT16 or HSGD_FLOAT16; 0
                          (HSGD_FLOAT32): as it is. Payloads that are sent whole stay exact */
  uint32_t wire_radix; /* at most so many nodes exchange directly, from 2 to 64; more than 8 of them
                          in rounds, in groups of at most so many */
  uint32_t flat_ranks; /* up to so many ranks of a node, from 1 to 1024, look at one another; more
                          are counted in groups, and each looks at its group alone */
  int32_t
      near_nic; /* of this rank alone: number, from 1, of the network adapter that it is near; 0:
                   none; < 0: what the kernel says. Such ranks exchange with other nodes first */
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
   * nothing: 1 ordinary, 2 non-temporal stores; on one node with its switch points and step in
   * oneshot_bytes, known_allreduce_bytes (0: as oneshot_bytes) and chunk_bytes. */
  uint32_t known_store;
  uint64_t known_allreduce_bytes;
  /* NULL, or what the communicators of this process share, which outlives them: each process that
   * they watch then takes one descriptor, not one for each communicator, and `hsgd status` sees
   * what these communicators do. */
  hsgd_process* process;
  uint64_t comm_id; /* 0, or a number for a communicator of several nodes, the same on all its ranks
                       and on no others: by it `hsgd status` knows that they belong together */
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
  uint64_t
      allreduce_bytes; /* the same switch point for allreduces, where each rank reads all inputs */
} hsgd_topology;

/* What an allreduce of one payload asks of each node, where all nodes have as many ranks. On one
 * node as if nothing were measured. */
typedef struct hsgd_allreduce_plan {
  uint64_t memory_bytes; /* of the communicator on one node, whatever the payload: shared segments
                            and buffers of all leaders */
  uint64_t steps;        /* of the pipeline; 0: the payload is small and goes with the headers */
  uint64_t step_bytes;   /* of the payload in one step */
  int32_t leaders;       /* ranks of the node that carry it between nodes; 0 on one node */
  int32_t rounds;        /* between nodes until all have heard from all; 0 on one node */
  int32_t messages;      /* that one leader sends in these rounds */
} hsgd_allreduce_plan;

HSGD_API uint32_t hsgd_abi_version(void);
/* Local. NULL where there is no memory for it. A forked child makes its own. */
HSGD_API hsgd_process* hsgd_process_create(void);
HSGD_API void hsgd_process_destroy(hsgd_process* process);
HSGD_API void hsgd_options_default(hsgd_options* options);
/* Defaults, then the HSGD_* variables (docs/configuration.md). HSGD_ERR_ARGUMENT names a malformed
 * one. The only reader of the environment in the native code. */
HSGD_API int hsgd_options_from_env(hsgd_options* options, hsgd_error* err);
HSGD_API size_t hsgd_dtype_bytes(hsgd_dtype dtype); /* 0 if unknown */
HSGD_API const char* hsgd_dtype_name(hsgd_dtype dtype);
HSGD_API const char* hsgd_op_name(hsgd_op op);
HSGD_API const char* hsgd_simd_name(void); /* "avx512", "avx2", "neon" or "plain" */
/* What this process may use: cores by affinity and the quota of its cgroups, at least 1; the memory
 * that its cgroups allow, UINT64_MAX where they have no limit. */
HSGD_API int hsgd_usable_cores(void);
HSGD_API uint64_t hsgd_memory_limit_bytes(void);

/* Local; needs no communicator and starts nothing. What a float32 sum of `bytes` would do on
 * `nodes` nodes of `ranks_per_node` ranks each. Times are for the caller to predict. */
HSGD_API int hsgd_plan_allreduce(const hsgd_options* options, int nodes, int ranks_per_node,
                                 uint64_t bytes, hsgd_allreduce_plan* plan, hsgd_error* err);

/* Collective over the `size` processes of one node that pass the same `path` (a UNIX socket is made
 * there by rank 0 and removed before this returns). Blocking, with options->timeout_s as deadline.
 */
HSGD_API int hsgd_comm_create_local(const char* path, int rank, int size,
                                    const hsgd_options* options, hsgd_comm** comm, hsgd_error* err);

/* --- ranks of several nodes over TCP, without MPI --- */

/* What a rank needs that carries data between nodes, a leader: an address at which the leaders of
 * other nodes find it, and connections to them. Each node has as many as the smallest one has
 * ranks, at most hsgd_most_leaders(); those on one lane connect to one another. */
typedef struct hsgd_leader hsgd_leader;
HSGD_API int hsgd_most_leaders(void);
/* Local. options->near_nic, or what the kernel says: the network adapter, from 1, that all
 * processors of this process are near; 0: none, or not known. */
HSGD_API int hsgd_near_nic(const hsgd_options* options);
/* Local. Who leads: fills the world ranks of each lane, by node, one lane behind the other, and
 * their number, at most hsgd_most_leaders() times the nodes. Ranks near an adapter lead first, by
 * turns over the adapters of their node. `node_of_rank`: `size` entries; nodes are numbered by
 * their first ranks. `nic_of_rank`: hsgd_near_nic() of each rank. */
HSGD_API int hsgd_leaders(const int32_t* node_of_rank, const int32_t* nic_of_rank, int size,
                          int32_t* leaders, int* count, hsgd_error* err);
HSGD_API size_t hsgd_leader_address_bytes(void);
/* Local. Listens at the interfaces that are named, separated by commas; "" or NULL: at all but
 * loopback. HSGD_ERR_SYSTEM where the file descriptors for connections to so many nodes are
 * missing.
 */
HSGD_API int hsgd_leader_create(const char* interfaces, int nodes, hsgd_leader** leader,
                                hsgd_error* err);
/* Local. Fills hsgd_leader_address_bytes() bytes, which go to the other leaders by a way of the
 * caller's that nobody else reads: they hold the secret by which leaders know one another. */
HSGD_API void hsgd_leader_address(const hsgd_leader* leader, void* address);
/* Collective over the leaders of one lane, blocking, with options->timeout_s as deadline.
 * `addresses` and world `ranks` of all of them, by node; `node` is the own one. Once. */
HSGD_API int hsgd_leader_connect(hsgd_leader* leader, const void* addresses, const int32_t* ranks,
                                 int nodes, int node, const hsgd_options* options, hsgd_error* err);
/* Local; NULL is nothing. Not needed where a communicator was made of it. */
HSGD_API void hsgd_leader_destroy(hsgd_leader* leader);
/* Collective over all ranks, blocking. `node_of_rank`: `size` entries; nodes are numbered by their
 * first ranks. `path`: as of hsgd_comm_create_local, the same on all ranks of a node, another one
 * on each. `leader`: connected, on leaders of several nodes, else NULL; taken on success.
 * `nic_of_rank`: as of hsgd_leaders, the same on all ranks. */
HSGD_API int hsgd_comm_create_over_tcp(const char* path, const int32_t* node_of_rank,
                                       const int32_t* nic_of_rank, int rank, int size,
                                       hsgd_leader* leader, const hsgd_options* options,
                                       hsgd_comm** comm, hsgd_error* err);

/* Local. Unmaps the segments. Waits for nobody, except for requests that are open, which it
 * finishes (each has its deadline). Peers that call more collectives than this rank did get
 * HSGD_ERR_PEER_LOST, those of other nodes when the leaders of this node have left, or called one,
 * too. */
HSGD_API void hsgd_comm_destroy(hsgd_comm* comm);

HSGD_API void hsgd_comm_topology(const hsgd_comm* comm, hsgd_topology* topology);
/* Local. The node of a rank, as node_rank of its topology; -1 where there is no such rank. */
HSGD_API int hsgd_comm_node_of(const hsgd_comm* comm, int rank);
/* Local. For `hsgd status`: the names of the hosts of all nodes, separated by commas. One rank of
 * each node says them. */
HSGD_API void hsgd_comm_tell_hosts(hsgd_comm* comm, const char* hosts);
/* Local. An epoll descriptor that watches all connections to other nodes; -1 where there are none
 * but MPI's. A child of fork closes what it watches: as long as it had the connections, other nodes
 * would not learn that this rank has died. */
HSGD_API int hsgd_comm_descriptor(const hsgd_comm* comm);
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

/* Local, never waits. Says why this rank leaves, for the hsgd_comm_leave or hsgd_comm_destroy that
 * comes next in this thread: other ranks are told "rank 3 (pid 4112, node2) WORDS" in place of
 * "closed its communicator". Of long words the first 256 bytes count. */
HSGD_API void hsgd_comm_explain_leaving(hsgd_comm* comm, const char* words);
/* Local, never waits. Tells the other ranks, as destroying it would, that this one calls no
 * collective any more, and has its own fail. Does nothing while another thread is in a collective.
 */
HSGD_API void hsgd_comm_leave(hsgd_comm* comm);
/* Have the collective that waits, in whatever thread, and all later ones end as if they were
   interrupted. Local, never blocks. */
HSGD_API void hsgd_comm_abort(hsgd_comm* comm);
/* The same, but they end as if `timeout_s`, above 0, had been their deadline: HSGD_ERR_TIMEOUT
 * names who was waited for, on the other ranks, too. */
HSGD_API void hsgd_comm_expire(hsgd_comm* comm, double timeout_s);

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
 * those that did not call it get HSGD_ERR_CLOSED from whatever they call. All ranks that return
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

#ifdef __cplusplus
}
#endif
#endif /* HSGD_CORE_H_ */
