// Where a call goes: to the engine (libhsgd_pmpi_*, beside this library, for the MPI that the
// program runs) or to that MPI.
//
// Every program of a job loads this library, shells and compilers too, so that it needs nothing but
// libc: neither MPI nor the C++ runtime, of which a program may bring another than ours. The engine
// needs both and is loaded by the first collective.
#ifndef HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_
#define HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_

namespace hsgd::preload {

// The engine, loaded if it is not yet; nullptr if that fails. Then one line on stderr says why, and
// all calls of this process stay with MPI. The same in all threads, for good.
void* engine();

// The engine if it is loaded, nullptr if not.
void* loaded_engine();

// Why engine() is nullptr, in one line; nullptr if it is not. Loads, but prints nothing.
const char* engine_failure();

// A function of the MPI that this program runs, such as "PMPI_Send". Ends the process with one line
// where there is none.
void* of_mpi(const char* name);

// A function of the engine, or of the program's MPI where the engine is not usable.
void* of_engine(const char* name, const char* instead);

}  // namespace hsgd::preload

#endif  // HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_
