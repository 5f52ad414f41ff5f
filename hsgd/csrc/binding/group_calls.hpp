// Blocking calls of a process group of torch.distributed that are no more than a call of the core:
// one plain tensor, an op that the core has, no timeout of their own.
//
// Owns what counts as such. Each function is false, and has done nothing, where a call is anything
// else: hsgd/c10d/collectives.py has the rest. Both describe a call to the core in the same way, as
// one rank may come here and another there.
#ifndef HSGD_BINDING_GROUP_CALLS_HPP_
#define HSGD_BINDING_GROUP_CALLS_HPP_

#include <nanobind/nanobind.h>

#include <type_traits>

#include "binding/collective_call.hpp"

namespace hsgd::python {

// tensors: a list; options: torch's, with asyncOp, timeout and what a kind needs: reduceOp,
// rootRank.
bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_reduce_scatter(Collective& it, nb::handle output, nb::handle source,
                               nb::handle options);
bool fill_group_broadcast(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source, nb::handle options);

// Comm has run_if(), which takes what fills a Collective in.
template <class Comm, class... Arguments>
auto group_call(bool (*fill)(Collective&, Arguments...)) {
  return [fill](Comm& self, std::conditional_t<true, Anything, Arguments>... arguments) {
    return self.run_if([&](Collective& it) { return fill(it, arguments...); });
  };
}

template <class Comm>
void def_group_calls(nb::class_<Comm>& comm) {
  const auto tensors = nb::arg("tensors"), output = nb::arg("output"), source = nb::arg("source");
  const auto options = nb::arg("options");
  comm.def("group_allreduce", group_call<Comm>(fill_group_allreduce), tensors, options)
      .def("group_reduce_scatter", group_call<Comm>(fill_group_reduce_scatter), output, source,
           options)
      .def("group_broadcast", group_call<Comm>(fill_group_broadcast), tensors, options)
      .def("group_allgather", group_call<Comm>(fill_group_allgather), output, source, options);
}

}  // namespace hsgd::python

#endif  // HSGD_BINDING_GROUP_CALLS_HPP_
