// Messages between leaders over MPI point-to-point. Calls PMPI_* only, so that an interposer never
// sees them.
#ifndef HSGD_TRANSPORT_MPI_HPP_
#define HSGD_TRANSPORT_MPI_HPP_

#include <mpi.h>

#include <memory>

#include "transport.hpp"

namespace hsgd {

// A communicator of our own, freed with its holder unless MPI was finalized before.
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

// Throws HSGD_ERR_SYSTEM with MPI's own words.
void check_mpi(int status, const char* what);

// `leaders` has one rank per node, in node order.
std::unique_ptr<Transport> make_mpi_transport(OwnComm leaders);

}  // namespace hsgd

#endif  // HSGD_TRANSPORT_MPI_HPP_
