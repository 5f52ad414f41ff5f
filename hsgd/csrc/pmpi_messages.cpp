// MPI's functions that start something which goes on after they return: noted, and passed on.
//
// Without mpi.h's prototypes: each argument is an integer or an address, of at most one machine
// word, and is handed on as it came, so that one template serves all functions; their C++ names are
// others, so that mpi.h can tell its version. Also blocking sends, which return while MPI still
// holds the data.
#include "pmpi_messages.hpp"

#include <mpi.h>

#include <atomic>
#include <cstdint>

#include "hsgd_core.h"

namespace hsgd::pmpi {
namespace {

// Relaxed: a thread that waits in a collective sees it at one of its next looks.
std::atomic<bool> noted{false};

}  // namespace

bool has_messages() { return noted.load(std::memory_order_relaxed); }

void note_messages() {
  if (!has_messages()) noted.store(true, std::memory_order_relaxed);
}

}  // namespace hsgd::pmpi

using Word = uintptr_t;

#define HSGD_WORDS_2(a) a##1, a##2
#define HSGD_WORDS_3(a) HSGD_WORDS_2(a), a##3
#define HSGD_WORDS_4(a) HSGD_WORDS_3(a), a##4
#define HSGD_WORDS_5(a) HSGD_WORDS_4(a), a##5
#define HSGD_WORDS_6(a) HSGD_WORDS_5(a), a##6
#define HSGD_WORDS_7(a) HSGD_WORDS_6(a), a##7
#define HSGD_WORDS_8(a) HSGD_WORDS_7(a), a##8
#define HSGD_WORDS_9(a) HSGD_WORDS_8(a), a##9
#define HSGD_WORDS_10(a) HSGD_WORDS_9(a), a##10
#define HSGD_WORDS_12(a) HSGD_WORDS_10(a), a##11, a##12
#define HSGD_WORDS_13(a) HSGD_WORDS_12(a), a##13
#define HSGD_WORDS_1(a) a##1

// Never a function that this MPI lacks: who looks for it by name, as mpi4py does, must not find it.
#define HSGD_STARTS(name, count)                                                        \
  extern "C" int hsgd_of_mpi_##name(HSGD_WORDS_##count(Word w)) __asm__("P" #name);     \
  extern "C" HSGD_API int hsgd_noted_##name(HSGD_WORDS_##count(Word w)) __asm__(#name); \
  extern "C" int hsgd_noted_##name(HSGD_WORDS_##count(Word w)) {                        \
    hsgd::pmpi::note_messages();                                                        \
    return hsgd_of_mpi_##name(HSGD_WORDS_##count(w));                                   \
  }
#if MPI_VERSION >= 4
#define HSGD_STARTS_BOTH(name, count) HSGD_STARTS(name, count) HSGD_STARTS(name##_c, count)
#else
#define HSGD_STARTS_BOTH(name, count) HSGD_STARTS(name, count)
#endif

HSGD_STARTS_BOTH(MPI_Send, 6)
HSGD_STARTS_BOTH(MPI_Bsend, 6)
HSGD_STARTS_BOTH(MPI_Ssend, 6)
HSGD_STARTS_BOTH(MPI_Rsend, 6)
HSGD_STARTS_BOTH(MPI_Sendrecv, 12)
HSGD_STARTS_BOTH(MPI_Sendrecv_replace, 9)
HSGD_STARTS_BOTH(MPI_Isend, 7)
HSGD_STARTS_BOTH(MPI_Ibsend, 7)
HSGD_STARTS_BOTH(MPI_Issend, 7)
HSGD_STARTS_BOTH(MPI_Irsend, 7)
HSGD_STARTS_BOTH(MPI_Irecv, 7)
HSGD_STARTS_BOTH(MPI_Imrecv, 5)
HSGD_STARTS_BOTH(MPI_Isendrecv, 13)
HSGD_STARTS_BOTH(MPI_Isendrecv_replace, 9)
HSGD_STARTS(MPI_Start, 1)  // all persistent ones, collectives too
HSGD_STARTS(MPI_Startall, 2)

HSGD_STARTS(MPI_Ibarrier, 2)
HSGD_STARTS_BOTH(MPI_Ibcast, 6)
HSGD_STARTS_BOTH(MPI_Iallreduce, 7)
HSGD_STARTS_BOTH(MPI_Ireduce, 8)
HSGD_STARTS_BOTH(MPI_Ireduce_scatter, 7)
HSGD_STARTS_BOTH(MPI_Ireduce_scatter_block, 7)
HSGD_STARTS_BOTH(MPI_Iscan, 7)
HSGD_STARTS_BOTH(MPI_Iexscan, 7)
HSGD_STARTS_BOTH(MPI_Iallgather, 8)
HSGD_STARTS_BOTH(MPI_Iallgatherv, 9)
HSGD_STARTS_BOTH(MPI_Igather, 9)
HSGD_STARTS_BOTH(MPI_Igatherv, 10)
HSGD_STARTS_BOTH(MPI_Iscatter, 9)
HSGD_STARTS_BOTH(MPI_Iscatterv, 10)
HSGD_STARTS_BOTH(MPI_Ialltoall, 8)
HSGD_STARTS_BOTH(MPI_Ialltoallv, 10)
HSGD_STARTS_BOTH(MPI_Ialltoallw, 10)
HSGD_STARTS_BOTH(MPI_Ineighbor_allgather, 8)
HSGD_STARTS_BOTH(MPI_Ineighbor_allgatherv, 9)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoall, 8)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoallv, 10)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoallw, 10)
HSGD_STARTS(MPI_Comm_idup, 3)
HSGD_STARTS(MPI_Comm_idup_with_info, 4)

HSGD_STARTS_BOTH(MPI_Win_create, 6)
HSGD_STARTS_BOTH(MPI_Win_allocate, 6)
HSGD_STARTS_BOTH(MPI_Win_allocate_shared, 6)
HSGD_STARTS(MPI_Win_create_dynamic, 3)
