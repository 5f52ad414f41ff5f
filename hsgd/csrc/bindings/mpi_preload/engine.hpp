// engine(): chooses the target of a call: the engine (libhsgd_pmpi_*, beside this library, for the
// MPI that the program runs) or that MPI.
//
// Every program of a job loads this library, also shells and compilers, so it needs only libc:
// neither MPI nor the C++ runtime, which a program may have in another version. The engine needs
// both; the first collective loads it.
#ifndef HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_
#define HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_

namespace hsgd::preload {

// Returns the engine, and loads it if necessary. Returns nullptr if that fails: then one line on
// stderr gives the reason, and all calls of this process use MPI. The result is permanent and the
// same in all threads.
void* engine();

// Returns the engine if it is loaded, else nullptr.
void* loaded_engine();

// Returns the reason for which engine() returns nullptr, in one line; nullptr if it does not. Loads
// the engine, but prints nothing.
const char* engine_failure();

// Returns a function of the MPI that this program runs, such as "PMPI_Send". Ends the process with
// one line if it does not exist.
void* of_mpi(const char* name);

// Returns a function of the engine, or of the program's MPI if the engine is not usable.
void* of_engine(const char* name, const char* instead);

}  // namespace hsgd::preload

#endif  // HSGD_BINDINGS_MPI_PRELOAD_ENGINE_HPP_
