// The agreement of all ranks on whether a part of their set-up succeeded.
//
// Owns who is believed: the first rank of those with the worst code. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_AGREEMENT_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_AGREEMENT_HPP_

#include <exception>
#include <optional>

#include "bindings/mpi_communicators/steps.hpp"
#include "core/base/error.hpp"

namespace hsgd {

// A failure that every rank of the communicator knows of: all may go on without what failed.
class AgreedError final : public Error {
 public:
  using Error::Error;
};

// Everybody learns whether everybody succeeded. `failure` is this rank's, if any; throws it, or
// that of another. `what` as for Steps.
void agree(Steps& steps, const std::optional<Error>& failure, const char* what);

// The same of `body`, which throws where it fails.
template <class Body>
void agree_on(Steps& steps, const char* what, Body&& body) {
  std::optional<Error> failure;
  try {
    body();
  } catch (const Error& error) {
    failure = error;
  } catch (const std::exception& error) {
    failure = Error(HSGD_ERR_SYSTEM, -1, error.what());
  }
  agree(steps, failure, what);
}

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_AGREEMENT_HPP_
