// messages_noted: true if the program has started messages of its own.
//
// bindings/mpi_interposer/messages.hpp describes the flag; the engine reads it.
#ifndef HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_
#define HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_

#include <atomic>

namespace hsgd::preload {

// Relaxed: a thread that waits in a collective sees it at one of its next looks.
extern std::atomic<bool> messages_noted;

}  // namespace hsgd::preload

#endif  // HSGD_BINDINGS_MPI_PRELOAD_MESSAGES_HPP_
