// The kinds of collectives as methods of Comm: their arguments and checks.
//
// A new kind needs a function that fills a Collective in, and a line in def_collectives().
#ifndef HSGD_BINDINGS_PYTHON_COLLECTIVES_HPP_
#define HSGD_BINDINGS_PYTHON_COLLECTIVES_HPP_

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <type_traits>

#include "bindings/arrays/array.hpp"
#include "bindings/python/collective_call.hpp"
#include "hsgd_core.h"

namespace hsgd::python {

// --- the kinds ---

inline void describe_allreduce(Collective& it, const Array& source, const Array& target, int op,
                               const Name& name) {
  it.set_label(source, name);
  hsgd_call& call = it.call();
  call.kind = HSGD_ALLREDUCE;
  call.in = source.data();
  call.out = target.data();
  call.count = source.count();
  call.dtype = source.dtype();
  call.op = static_cast<hsgd_op>(op);
}

// Describes an allgather into the output of `it`, or into memory of its own.
inline void describe_allgather(Collective& it, const Array& source, const Name& name) {
  it.call().count = source.rows();
  it.set_label(source, name, true);
  it.expect_rows(source, HSGD_ALLGATHER_ROWS, "allgather");
}

inline void allreduce(Collective& it, nb::handle in, nb::handle out, int op, const Name& name) {
  const Array& source = it.take_in(in, "allreduce");
  const bool in_place = in.is(out) && source.is_writable();  // one check costs half as much as two
  const Array& target = in_place ? source : it.take_out(out, "allreduce, out");
  if (!source.is_like(target)) {
    throw nb::value_error(
        "allreduce: out has another shape or dtype than the input; pass one like it");
  }
  describe_allreduce(it, source, target, op, name);
}

inline void describe_broadcast(Collective& it, const Array& array, int root, const Name& name) {
  it.set_label(array, name);
  hsgd_call& call = it.call();
  call.kind = HSGD_BROADCAST;
  call.in = call.out = array.data();
  call.count = array.count();
  call.dtype = array.dtype();
  call.root = root;
}

inline void broadcast(Collective& it, nb::handle data, int root, const Name& name) {
  describe_broadcast(it, it.take_out(data, "broadcast"), root, name);
}

inline void barrier(Collective& it) { it.call().kind = HSGD_BARRIER; }

inline void function(Collective& it, nb::object python) { it.take_function(std::move(python)); }

// `rows`: of each rank.
inline void describe_reduce_scatter(Collective& it, const Array& source, const Array& target,
                                    int op, const Rows& rows, const Name& name) {
  it.set_label(source, name);
  hsgd_call& call = it.call();
  call.kind = HSGD_REDUCE_SCATTER;
  call.in = source.data();
  call.out = target.data();
  call.counts = it.keep(elements_of(source, rows));
  call.dtype = source.dtype();
  call.op = static_cast<hsgd_op>(op);
}

inline void reduce_scatter(Collective& it, nb::handle in, nb::handle out, int op,
                           const std::optional<Rows>& counts, const Name& name) {
  const Array& source = it.take_in(in, "reduce_scatter");
  const Array& target = it.take_out(out, "reduce_scatter, out");
  const Rows rows = it.rows_of_ranks(source, counts, "reduce_scatter");
  check_joined(source, target, rows[static_cast<size_t>(it.rank())], "reduce_scatter");
  describe_reduce_scatter(it, source, target, op, rows, name);
}

inline void allgather(Collective& it, nb::handle in, nb::handle out, const Name& name) {
  const Array& source = it.take_in(in, "allgather");
  it.take_joined(source, out, "allgather");
  describe_allgather(it, source, name);
}

// Describes an alltoall with the same number of rows for each rank.
inline void alltoall(Collective& it, nb::handle in, nb::handle out, const Name& name) {
  const Array& source = it.take_in(in, "alltoall");
  const Array& target = it.take_out(out, "alltoall, out");
  const Rows rows = it.rows_of_ranks(source, std::nullopt, "alltoall");
  if (rows.front() != rows.back()) {
    throw nb::value_error(("alltoall: " + std::to_string(source.rows()) +
                           " rows cannot be split evenly over " + std::to_string(it.size()) +
                           " ranks; give send_counts")
                              .c_str());
  }
  check_joined(source, target, source.rows(), "alltoall");
  it.set_label(source, name);
  hsgd_call& call = it.call();
  call.kind = HSGD_ALLTOALL;
  call.in = source.data();
  call.out = target.data();
  call.counts = call.receive_counts = it.keep(elements_of(source, rows));
  call.dtype = source.dtype();
}

inline void alltoall_rows(Collective& it, nb::handle in, const Rows& counts, nb::handle out,
                          const Name& name) {
  const Array& source = it.take_in(in, "alltoall");
  it.call().counts = it.keep(it.rows_of_ranks(source, counts, "alltoall"));
  it.set_label(source, name, true);
  it.take_joined(source, out, "alltoall");
  it.expect_rows(source, HSGD_ALLTOALL_ROWS, "alltoall");
}

// --- their methods ---

// The result of a kind that allocates its output: see Collective::result().
using Gathered = nb::typed<nb::tuple, Anything, Rows>;

template <class Result, class Comm, class... Arguments>
auto blocking(void (*fill)(Collective&, Arguments...)) {
  return [fill](Comm& self, Arguments... arguments) {
    nb::object result = self.run([&](Collective& it) { fill(it, arguments...); });
    if constexpr (!std::is_void_v<Result>) return nb::borrow<Result>(result);
  };
}

template <class Comm, class... Arguments>
auto starting(void (*fill)(Collective&, Arguments...)) {
  return [fill](Comm& self, Arguments... arguments) {
    return self.start([&](Collective& it) { fill(it, arguments...); });
  };
}

// Defines NAME, which blocks, and NAME_async, which returns a Request. Comm::run() and
// Comm::start() take the function that fills a Collective in.
template <class Comm>
void def_collectives(nb::class_<Comm>& comm) {
  const auto def_async = [&](const char* name, auto fill, const auto&... arguments) {
    comm.def((std::string(name) + "_async").c_str(), starting<Comm>(fill), arguments...);
  };
  const auto def = [&](const char* name, auto fill, const auto&... arguments) {
    comm.def(name, blocking<void, Comm>(fill), arguments...);
    def_async(name, fill, arguments...);
  };
  const auto def_gathering = [&](const char* name, auto fill, const auto&... arguments) {
    comm.def(name, blocking<Gathered, Comm>(fill), arguments...);
    def_async(name, fill, arguments...);
  };
  const auto source = nb::arg("source").none();
  const auto out = nb::arg("out").none();
  const auto name = nb::arg("name").none();
  def("allreduce", allreduce, source, out, nb::arg("op"), name);
  def("broadcast", broadcast, nb::arg("data").none(), nb::arg("root"), name);
  def("barrier", barrier);
  def("function", function, nb::arg("python"));
  def("reduce_scatter", reduce_scatter, source, out, nb::arg("op"), nb::arg("counts").none(), name);
  def_gathering("allgather", allgather, source, out, name);
  def("alltoall", alltoall, source, out, name);
  def_gathering("alltoall_rows", alltoall_rows, source, nb::arg("counts"), out, name);
}

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_COLLECTIVES_HPP_
