// A collective as Python describes it, and what is left of it after it was submitted.
//
// Owns the arrays, which stay exported to the core until the collective is done, and the memory of
// results whose size only the ranks together know. Everything here is called with the GIL held, but
// for place_rows(); waiting releases it. No logic.
#ifndef HSGD_BINDING_COLLECTIVE_CALL_HPP_
#define HSGD_BINDING_COLLECTIVE_CALL_HPP_

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "binding/array.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

using Name = nb::typed<nb::handle, nb::str>;  // or None

// The characters, as long as the string lives; NULL for None. Throws TypeError or ValueError.
const char* text_of(const Name& name);

using Rows = std::vector<uint64_t>;  // one per rank

// One collective with its arguments checked. Filled once, and kept where it is.
class Collective {
 public:
  explicit Collective(const hsgd_topology& topology) : topology_(topology) {}
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Each throws TypeError or ValueError for arrays and counts that cannot be used. Counts are rows;
  // none: as even as can be, the first ranks get one more.
  void allreduce(nb::handle in, nb::handle out, int op, const Name& name);
  void broadcast(nb::handle data, int root, const Name& name);
  void barrier() { call_.kind = HSGD_BARRIER; }
  void reduce_scatter(nb::handle in, nb::handle out, int op, const std::optional<Rows>& counts,
                      const Name& name);
  void allgather(nb::handle in, nb::handle out, const Name& name);  // `out` may be None
  // As many rows to each rank as to any other.
  void alltoall(nb::handle in, nb::handle out, const Name& name);
  void alltoall_rows(nb::handle in, const Rows& counts, nb::handle out,
                     const Name& name);  // so, too

  const hsgd_call& call() const { return call_; }
  void give_arrays_back();
  // What an `out` of None stands for, when the collective has succeeded: the bytes of the result,
  // or None, and the rows from each rank. None for those that are given all they need.
  nb::object result();

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  void set_label(const Array& array, const Name& name, bool ragged = false);
  void check_split(const Array& source, const Rows& counts, const std::string& what) const;
  void expect_rows(const Array& source, nb::handle out, hsgd_kind kind);
  // Without the GIL.
  void* place_rows(const uint64_t* rows, hsgd_error* err);

  const hsgd_topology topology_;
  std::optional<Array> in_;
  std::optional<Array> out_;
  Rows counts_;
  std::vector<int64_t> shape_;
  hsgd_label label_{};
  hsgd_call call_{};
  Rows rows_;
  size_t row_bytes_ = 0;
  std::unique_ptr<std::byte[], Free> memory_;  // of the result, until Python has it
  nb::object bytes_;
};

// A submitted collective: shared by the communicator, until it is done, and the caller's Request.
struct Submitted {
  explicit Submitted(const hsgd_topology& topology) : collective(topology) {}
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
  Anything result() { return submitted_->collective.result(); }

 private:
  std::shared_ptr<Submitted> submitted_;
};

}  // namespace hsgd::python

#endif  // HSGD_BINDING_COLLECTIVE_CALL_HPP_
