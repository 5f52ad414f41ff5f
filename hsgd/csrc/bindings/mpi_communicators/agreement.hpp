// agree(): lets all ranks agree whether a part of their set-up succeeded.
//
// The first rank with the worst code wins. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_AGREEMENT_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_AGREEMENT_HPP_

#include <exception>
#include <optional>

#include "bindings/mpi_communicators/steps.hpp"
#include "core/base/error.hpp"

namespace hsgd {

// A failure that every rank of the communicator knows: all may continue without the failed part.
class AgreedError final : public Error {
 public:
  using Error::Error;
};

// Tells all ranks if all succeeded. `failure` is this rank's, if any. Throws it, or that of another
// rank. `what` is as for Steps.
void agree(Steps& steps, const std::optional<Error>& failure, const char* what);

// Does the same for the result of `body`, which throws if it fails.
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
