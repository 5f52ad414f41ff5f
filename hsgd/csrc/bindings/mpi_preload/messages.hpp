// Whether the program has messages of its own, as the functions that start them note it.
//
// Owns the flag, which bindings/mpi_interposer/messages.hpp describes and the engine reads.
#ifndef HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_
#define HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_

#include <atomic>

namespace hsgd::preload {

// Relaxed: a thread that waits in a collective sees it at one of its next looks.
extern std::atomic<bool> messages_noted;

}  // namespace hsgd::preload

#endif  // HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_
