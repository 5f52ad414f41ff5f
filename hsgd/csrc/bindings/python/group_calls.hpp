// Calls of a torch.distributed process group that map to one call of the core: one plain tensor, an
// op of the core, no own timeout.
//
// Each function returns false, having done nothing, for any other call, which
// hsgd/c10d/collectives.py handles. Both describe a call to the core in the same way, because ranks
// may take different ways.
#ifndef HSGD_BINDINGS_PYTHON_GROUP_CALLS_HPP_
#define HSGD_BINDINGS_PYTHON_GROUP_CALLS_HPP_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings/python/collective_call.hpp"

namespace hsgd::python {

// The request in torch's `options`. kOther: the core cannot do it directly.
enum class Asked { kOther, kBlocking, kAsync };
Asked asked_by(nb::handle options);

// Tensors of this size may be buckets of DDP, which moves them (hsgd/c10d/ddp_buckets.py).
constexpr uint64_t kLeastBucketBytes = 1 << 20;
// Returns true if a collective may be queued in the core: it is no bucket, and no pass of autograd
// calls it, whose errors are raised elsewhere.
bool may_be_queued(const Collective& it);

// tensors: a list; options: torch's, with the fields of the kind: reduceOp, rootRank.
bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_reduce_scatter(Collective& it, nb::handle output, nb::handle source,
                               nb::handle options);
bool fill_group_broadcast(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source, nb::handle options);

// Calls Comm::run_if() or Comm::start_if() with the function that fills a Collective in. Returns
// None if the call is done, a Request if it is in progress, False for any other call.
template <class Comm, class... Arguments>
auto group_call(bool (*fill)(Collective&, Arguments...)) {
  return
      [fill](Comm& self, std::conditional_t<true, Anything, Arguments>... arguments) -> Anything {
        const nb::handle options = std::get<sizeof...(Arguments) - 1>(std::tie(arguments...));
        const auto describe = [&](Collective& it) { return fill(it, arguments...); };
        switch (asked_by(options)) {
          case Asked::kBlocking:
            return nb::cast(self.run_if(describe) ? nb::object(nb::none()) : nb::cast(false));
          case Asked::kAsync: {
            std::optional<Request> request =
                self.start_if([&](Collective& it) { return describe(it) && may_be_queued(it); });
            if (request) return nb::cast(std::move(*request));
            break;
          }
          case Asked::kOther:
            break;
        }
        return nb::cast(false);
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

#endif  // HSGD_BINDINGS_PYTHON_GROUP_CALLS_HPP_
