// The interposer's engine: MPI's functions as Fortran programs call them, with Open MPI.
//
// Open MPI's own Fortran functions call PMPI_*, so that a C interposer never sees them. These turn
// handles and the addresses that stand for MPI_IN_PLACE and MPI_BOTTOM into C's, as those do, and
// call the C functions of this library. MPICH's Fortran functions call the C ones by themselves.
//
// One function serves all names of a subroutine (bindings/mpi_preload/collectives.cpp): the handles
// of the module `mpi_f08` are structures of one integer, and its ierror may be missing
// (MPI 4.1, 19.1.5).
#include <mpi.h>

#ifdef OPEN_MPI

#include <type_traits>
#include <vector>

#include "bindings/mpi_interposer/messages.hpp"
#include "bindings/mpi_interposer/mpi_c.hpp"
#include "hsgd_core.h"

// Open MPI defines one of each in libmpi, named for the Fortran compiler of its build. If the
// program has its own copy, that copy is in effect.
extern "C" {
extern char mpi_fortran_in_place [[gnu::weak]];
extern char mpi_fortran_in_place_ [[gnu::weak]];
extern char mpi_fortran_in_place__ [[gnu::weak]];
extern char MPI_FORTRAN_IN_PLACE [[gnu::weak]];
extern char mpi_fortran_bottom [[gnu::weak]];
extern char mpi_fortran_bottom_ [[gnu::weak]];
extern char mpi_fortran_bottom__ [[gnu::weak]];
extern char MPI_FORTRAN_BOTTOM [[gnu::weak]];
}

namespace {

// Returns the C address of a Fortran buffer.
void* buffer(void* data) {
  const auto is = [data](const char* sentinel) { return sentinel != nullptr && data == sentinel; };
  if (is(&mpi_fortran_in_place_) || is(&mpi_fortran_in_place) || is(&mpi_fortran_in_place__) ||
      is(&MPI_FORTRAN_IN_PLACE))
    return MPI_IN_PLACE;
  if (is(&mpi_fortran_bottom_) || is(&mpi_fortran_bottom) || is(&mpi_fortran_bottom__) ||
      is(&MPI_FORTRAN_BOTTOM))
    return MPI_BOTTOM;
  return data;
}

MPI_Comm communicator(const MPI_Fint* handle) {
  hsgd::pmpi::note_messages();  // a Fortran program's messages are not seen
  return PMPI_Comm_f2c(*handle);
}
MPI_Datatype datatype(const MPI_Fint* handle) { return PMPI_Type_f2c(*handle); }
MPI_Op operation(const MPI_Fint* handle) { return PMPI_Op_f2c(*handle); }
int number(const MPI_Fint* value) { return static_cast<int>(*value); }

// An integer for each rank; a Fortran integer may be longer than C's.
class Numbers {
 public:
  Numbers(const MPI_Fint* values, MPI_Comm comm) {
    if constexpr (std::is_same_v<MPI_Fint, int>) {
      data_ = reinterpret_cast<const int*>(values);
    } else {
      int ranks = 0;
      int inter = 0;
      PMPI_Comm_test_inter(comm, &inter);
      inter != 0 ? PMPI_Comm_remote_size(comm, &ranks) : PMPI_Comm_size(comm, &ranks);
      copy_.assign(values, values + ranks);
      data_ = copy_.data();
    }
  }
  const int* data() const { return data_; }

 private:
  std::vector<int> copy_;
  const int* data_;
};

void tell(int status, MPI_Fint* ierror) {
  if (ierror != nullptr) *ierror = status;
}

}  // namespace

extern "C" {

HSGD_API void hsgd_mpi_allreduce(void* in, void* out, MPI_Fint* count, MPI_Fint* type, MPI_Fint* op,
                                 MPI_Fint* comm, MPI_Fint* ierror) {
  tell(hsgd_MPI_Allreduce(buffer(in), buffer(out), number(count), datatype(type), operation(op),
                          communicator(comm)),
       ierror);
}

HSGD_API void hsgd_mpi_bcast(void* data, MPI_Fint* count, MPI_Fint* type, MPI_Fint* root,
                             MPI_Fint* comm, MPI_Fint* ierror) {
  tell(
      hsgd_MPI_Bcast(buffer(data), number(count), datatype(type), number(root), communicator(comm)),
      ierror);
}

HSGD_API void hsgd_mpi_barrier(MPI_Fint* comm, MPI_Fint* ierror) {
  tell(hsgd_MPI_Barrier(communicator(comm)), ierror);
}

HSGD_API void hsgd_mpi_allgather(void* in, MPI_Fint* count, MPI_Fint* type, void* out,
                                 MPI_Fint* out_count, MPI_Fint* out_type, MPI_Fint* comm,
                                 MPI_Fint* ierror) {
  tell(hsgd_MPI_Allgather(buffer(in), number(count), datatype(type), buffer(out), number(out_count),
                          datatype(out_type), communicator(comm)),
       ierror);
}

HSGD_API void hsgd_mpi_allgatherv(void* in, MPI_Fint* count, MPI_Fint* type, void* out,
                                  MPI_Fint* out_counts, MPI_Fint* places, MPI_Fint* out_type,
                                  MPI_Fint* comm, MPI_Fint* ierror) {
  MPI_Comm group = communicator(comm);
  const Numbers counts(out_counts, group);
  const Numbers offsets(places, group);
  tell(hsgd_MPI_Allgatherv(buffer(in), number(count), datatype(type), buffer(out), counts.data(),
                           offsets.data(), datatype(out_type), group),
       ierror);
}

HSGD_API void hsgd_mpi_reduce_scatter(void* in, void* out, MPI_Fint* counts, MPI_Fint* type,
                                      MPI_Fint* op, MPI_Fint* comm, MPI_Fint* ierror) {
  MPI_Comm group = communicator(comm);
  tell(hsgd_MPI_Reduce_scatter(buffer(in), buffer(out), Numbers(counts, group).data(),
                               datatype(type), operation(op), group),
       ierror);
}

HSGD_API void hsgd_mpi_reduce_scatter_block(void* in, void* out, MPI_Fint* count, MPI_Fint* type,
                                            MPI_Fint* op, MPI_Fint* comm, MPI_Fint* ierror) {
  tell(hsgd_MPI_Reduce_scatter_block(buffer(in), buffer(out), number(count), datatype(type),
                                     operation(op), communicator(comm)),
       ierror);
}

}  // extern "C"

#endif  // OPEN_MPI
