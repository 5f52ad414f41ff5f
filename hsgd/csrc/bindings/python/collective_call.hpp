// A collective as Python describes it, and what is left of it after it was submitted.
//
// Owns the arrays, which stay exported to the core until the collective is done, and the memory of
// results whose size only the ranks together know. Everything here is called with the GIL held, but
// for place_rows(); waiting releases it. No logic.
#ifndef HSGD_BINDINGS_PYTHON_COLLECTIVE_CALL_HPP_
#define HSGD_BINDINGS_PYTHON_COLLECTIVE_CALL_HPP_

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arrays/array.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

using Name = nb::typed<nb::handle, nb::str>;  // or None

// The characters, as long as the string lives; NULL for None. Throws TypeError or ValueError.
const char* text_of(const Name& name);

using Rows = std::vector<uint64_t>;  // one per rank

// Throws ValueError where `target` is not like `source` but for the rows, or has not `rows`.
void check_joined(const Array& source, const Array& target, uint64_t rows, const char* what);
Rows elements_of(const Array& array, Rows rows);

// One collective with its arguments checked. Filled once, and kept where it is.
class Collective {
 public:
  explicit Collective(const hsgd_topology& topology) : topology_(topology) {}
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // What a kind of collective is filled in with. Each throws TypeError or ValueError for what
  // cannot be used, of which `what` are the first words. Arrays are taken once each.
  const Array& take_in(nb::handle array, const char* what) {
    return in_.emplace(array, what, false);
  }
  const Array& take_out(nb::handle array, const char* what) {
    return out_.emplace(array, what, true);
  }
  // A plain tensor, as one dimension; nullptr where it is none, and nothing was taken.
  const Array* take_flat_in(nb::handle tensor) { return take_flat(in_, tensor) ? &*in_ : nullptr; }
  const Array* take_flat_out(nb::handle tensor) {
    return take_flat(out_, tensor) ? &*out_ : nullptr;
  }
  // Where rows like those of `source` go, however many; None: to memory of its own.
  void take_joined(const Array& source, nb::handle out, const char* what);
  // `ragged`: the number of rows may differ between ranks.
  void set_label(const Array& array, const Name& name, bool ragged = false);
  // The rows of each rank, or none: as even as can be, the first ranks get one more.
  Rows rows_of_ranks(const Array& array, const std::optional<Rows>& given, const char* what) const;
  const uint64_t* keep(Rows counts) { return (counts_ = std::move(counts)).data(); }
  // For kinds that say where their rows go when the ranks have told one another how many there are.
  void expect_rows(const Array& source, hsgd_kind kind, const char* what);
  hsgd_call& call() { return call_; }
  int rank() const { return topology_.rank; }
  int size() const { return topology_.size; }

  const hsgd_call& call() const { return call_; }
  void give_arrays_back();
  // What an `out` of None stands for, when the collective has succeeded: the bytes of the result,
  // or None, and the rows from each rank. None for those that are given all they need.
  nb::object result();

 private:
  static bool take_flat(std::optional<Array>& place, nb::handle tensor);
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  // Without the GIL.
  void* place_rows(const uint64_t* rows, hsgd_error* err);

  const hsgd_topology topology_;
  const char* what_ = "";
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

#endif  // HSGD_BINDINGS_PYTHON_COLLECTIVE_CALL_HPP_
