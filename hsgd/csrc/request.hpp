// A collective as Python describes it, and what is left of it after it was submitted.
//
// Owns the arrays, which stay exported to the core until the collective is done. Everything here is
// called with the GIL held; waiting releases it. No logic.
#ifndef HSGD_REQUEST_HPP_
#define HSGD_REQUEST_HPP_

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>

#include "array.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

// Throws the exception that stands for a status of the core; nothing for HSGD_OK.
void raise_on_error(int status, const hsgd_error& error);

// The characters of a string, as long as it lives; NULL for None.
const char* text_of(nb::handle name);

// One collective with its arguments checked. Filled once, and kept where it is.
class Collective {
 public:
  Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Each throws TypeError or ValueError for arrays that cannot be used.
  void allreduce(nb::handle in, nb::handle out, int op, nb::handle name);
  void broadcast(nb::handle data, int root, nb::handle name);
  void barrier() { call_.kind = HSGD_BARRIER; }

  const hsgd_call& call() const { return call_; }
  void give_arrays_back();

 private:
  void set_label(const Array& array, nb::handle name);

  std::optional<Array> in_;
  std::optional<Array> out_;
  hsgd_label label_{};
  hsgd_call call_{};
};

// A submitted collective: shared by the communicator, until it is done, and the caller's Request.
struct Submitted {
  Submitted() = default;
  ~Submitted() { hsgd_request_free(request); }
  Submitted(const Submitted&) = delete;
  Submitted& operator=(const Submitted&) = delete;
  bool done() const { return hsgd_request_done(request) != 0; }

  Collective collective;
  hsgd_request* request = nullptr;
};

// What Python holds. Dropping it leaves the collective running and its arrays alone.
class Request {
 public:
  explicit Request(std::shared_ptr<Submitted> submitted) : submitted_(std::move(submitted)) {}
  bool done() const { return submitted_->done(); }
  // False when it is not done within `timeout_s`, if that is not negative. Throws what the
  // collective ended with.
  bool wait(double timeout_s);

 private:
  std::shared_ptr<Submitted> submitted_;
};

}  // namespace hsgd::python

#endif  // HSGD_REQUEST_HPP_
