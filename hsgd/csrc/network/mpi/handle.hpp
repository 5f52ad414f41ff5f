// OwnComm, UntilFinalize: MPI communicators that are freed with their owner, and objects that live
// until MPI_Finalize. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_HANDLE_HPP_
#define HSGD_NETWORK_MPI_HANDLE_HPP_

#include <mpi.h>

#include <memory>
#include <utility>

namespace hsgd {

// Throws HSGD_ERR_SYSTEM with MPI's error text, or HSGD_ERR_PEER_LOST, for no rank, if MPI reports
// that a rank died.
void check_mpi(int status, const char* what);

// Returns true if MPI_Finalize is done: then no MPI function may be called.
bool mpi_is_finalized();

// While it lives, errors on a communicator of the program are only returned: our caller reports
// them to the program, once.
class QuietErrors {
 public:
  explicit QuietErrors(MPI_Comm comm);
  ~QuietErrors();
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;

 private:
  MPI_Comm comm_;
  MPI_Errhandler programs_ = MPI_ERRHANDLER_NULL;
};

// A communicator of our own, freed with its owner unless MPI was finalized before.
class OwnComm {
 public:
  OwnComm() = default;
  explicit OwnComm(MPI_Comm comm) : comm_(comm) {}
  OwnComm(OwnComm&& other) noexcept : comm_(other.comm_) { other.comm_ = MPI_COMM_NULL; }
  OwnComm& operator=(OwnComm&& other) noexcept {
    std::swap(comm_, other.comm_);
    return *this;
  }
  ~OwnComm();
  MPI_Comm get() const { return comm_; }
  bool valid() const { return comm_ != MPI_COMM_NULL; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

// Shared by leaders and the code that sets them up; the last owner frees it.
using SharedComm = std::shared_ptr<const OwnComm>;

// The only object of its type in this process; MPI destroys it. It is an attribute of
// MPI_COMM_SELF, which is deleted first in MPI_Finalize, when communicators can still be freed. It
// is not a global, because its MPI handles end with MPI.
template <class Object>
class UntilFinalize {
 public:
  // Returns the object, which the first caller makes; nullptr once MPI_Finalize has begun. MPI must
  // be running. Do not call it from callbacks of MPI_Finalize, when MPICH's list of attributes
  // holds some that are gone.
  static Object* get() {
    static const int key = make();
    Object* object = nullptr;
    int found = 0;
    check_mpi(PMPI_Comm_get_attr(MPI_COMM_SELF, key, &object, &found), "MPI_Comm_get_attr");
    return found != 0 ? object : nullptr;
  }

 private:
  static int make() {
    int key = MPI_KEYVAL_INVALID;
    check_mpi(PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, destroy, &key, nullptr),
              "MPI_Comm_create_keyval");
    auto object = std::make_unique<Object>();
    check_mpi(PMPI_Comm_set_attr(MPI_COMM_SELF, key, object.get()), "MPI_Comm_set_attr");
    static_cast<void>(object.release());
    return key;
  }

  static int destroy(MPI_Comm, int, void* object, void*) {
    delete static_cast<Object*>(object);
    return MPI_SUCCESS;
  }
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_HANDLE_HPP_
