// Whether the program has messages of its own, which go on only while a rank is inside MPI.
//
// Reads one flag, which never goes back: that a process has started a message, a non-blocking or
// persistent collective, or a window, and so may have one under way. What is under way just now
// nobody knows but MPI. Programs without any (Horovod) may sleep while they wait. The functions
// that start them are in bindings/mpi_preload/messages.cpp, which has the flag.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_

namespace hsgd::pmpi {

bool has_messages();
// For callers whose messages are not seen: Open MPI's Fortran functions call PMPI's.
void note_messages();

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_MESSAGES_HPP_
