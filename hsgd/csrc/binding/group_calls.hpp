// Blocking calls of a process group of torch.distributed that are no more than a call of the core:
// one plain tensor, an op that the core has, no timeout of their own.
//
// Owns what counts as such. Each function is false, and has done nothing, where a call is anything
// else: hsgd/c10d/collectives.py has the rest. Both describe a call to the core in the same way, as
// one rank may come here and another there.
#ifndef HSGD_BINDING_GROUP_CALLS_HPP_
#define HSGD_BINDING_GROUP_CALLS_HPP_

#include <nanobind/nanobind.h>

#include "binding/collective_call.hpp"

namespace hsgd::python {

// tensors: a list; options: torch's, with asyncOp, timeout and, of a reduction, reduceOp.
bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source, nb::handle options);

}  // namespace hsgd::python

#endif  // HSGD_BINDING_GROUP_CALLS_HPP_
