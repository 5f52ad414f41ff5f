// Tells if the program has messages of its own, which progress only while a rank is inside MPI.
//
// Reads one flag, which is never cleared: it is set if a process has started a message, a
// nonblocking or persistent collective, or a window, and so may have one in progress. Only MPI
// knows what is in progress at present. Programs without any (Horovod) may sleep while they wait.
// The functions that start them are in bindings/mpi_preload/messages.cpp, which holds the flag.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_

namespace hsgd::pmpi {

bool has_messages();
// Sets the flag for callers whose messages are not seen: Open MPI's Fortran functions call PMPI's.
void note_messages();

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_
