// Collective: a collective with arguments from Python, and its state after submission.
//
// Owns the arrays, which stay exported to the core until the collective is done, and the memory of
// results whose size is known only after the ranks exchange it. All functions need the GIL, except
// place_rows(); waiting releases it. No logic.
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

// Returns the characters, which live as long as the string; NULL for None. Throws TypeError or
// ValueError.
const char* text_of(const Name& name);

using Rows = std::vector<uint64_t>;  // one per rank

// Throws ValueError if `target` differs from `source` in more than the rows, or has not `rows`
// rows.
void check_joined(const Array& source, const Array& target, uint64_t rows, const char* what);
Rows elements_of(const Array& array, Rows rows);

// One collective with checked arguments. Filled once, and never moved.
class Collective {
 public:
  explicit Collective(const hsgd_topology& topology) : topology_(topology) {}
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Fill in the arguments of a collective. Each throws TypeError or ValueError for an invalid one;
  // the text begins with `what`. Each array is taken once.
  const Array& take_in(nb::handle array, const char* what) {
    return in_.emplace(array, what, false);
  }
  const Array& take_out(nb::handle array, const char* what) {
    return out_.emplace(array, what, true);
  }
  // Takes a plain tensor as one dimension; returns nullptr, having taken nothing, for other
  // objects.
  const Array* take_flat_in(nb::handle tensor) { return take_flat(in_, tensor) ? &*in_ : nullptr; }
  const Array* take_flat_out(nb::handle tensor) {
    return take_flat(out_, tensor) ? &*out_ : nullptr;
  }
  // Takes the output for any number of rows like those of `source`; None: allocates memory.
  void take_joined(const Array& source, nb::handle out, const char* what);
  // `ragged`: the number of rows may differ between ranks.
  void set_label(const Array& array, const Name& name, bool ragged = false);
  // Returns the rows of each rank: those given, else an even division in which the first ranks get
  // one more.
  Rows rows_of_ranks(const Array& array, const std::optional<Rows>& given, const char* what) const;
  const uint64_t* keep(Rows counts) { return (counts_ = std::move(counts)).data(); }
  // Takes a function of Python, which runs in its turn between collectives and must not raise.
  void take_function(nb::object function);
  // For kinds that choose the place of their rows after the ranks have exchanged the numbers of
  // rows.
  void expect_rows(const Array& source, hsgd_kind kind, const char* what);
  hsgd_call& call() { return call_; }
  int rank() const { return topology_.rank; }
  int size() const { return topology_.size; }

  const hsgd_call& call() const { return call_; }
  void give_arrays_back();
  // Returns the result for an `out` of None after success: the bytes, or None, and the rows from
  // each rank. Returns None for kinds with a given output.
  nb::object result();

 private:
  static bool take_flat(std::optional<Array>& place, nb::handle tensor);
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  // Called without the GIL.
  void call_function();
  // Returns the place of the rows. Called without the GIL.
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
  std::unique_ptr<std::byte[], Free> memory_;  // of the result, until Python owns it
  nb::object bytes_;
  nb::object function_;  // until it is called
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

// The request object of Python. Dropping it leaves the collective running, with its arrays.
class Request {
 public:
  explicit Request(std::shared_ptr<Submitted> submitted) : submitted_(std::move(submitted)) {}
  bool done() const { return submitted_->done(); }
  // Returns false if it is not done within `timeout_s`, if that is not negative. Throws the error
  // of the collective.
  bool wait(double timeout_s);
  Anything result() { return submitted_->collective.result(); }

 private:
  std::shared_ptr<Submitted> submitted_;
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_COLLECTIVE_CALL_HPP_
