// Calls of a process group of torch.distributed that are no more than a call of the core: one plain
// tensor, an op that the core has, no timeout of their own.
//
// Owns what counts as such. Each function is false, and has done nothing, where a call is anything
// else: hsgd/c10d/collectives.py has the rest. Both describe a call to the core in the same way, as
// one rank may come here and another there.
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

// What `options` of torch ask for. kOther: something that the core does not do as it is.
enum class Asked { kOther, kBlocking, kAsync };
Asked asked_by(nb::handle options);

// Those of this many bytes may be buckets of DDP, which moves them (hsgd/c10d/ddp_buckets.py).
constexpr uint64_t kLeastBucketBytes = 1 << 20;
// Whether a collective may go to the core's queue: no pass of autograd asks for it, whose errors
// others raise, and it is no bucket.
bool may_be_queued(const Collective& it);

// tensors: a list; options: torch's, with what a kind needs: reduceOp, rootRank.
bool fill_group_allreduce(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_reduce_scatter(Collective& it, nb::handle output, nb::handle source,
                               nb::handle options);
bool fill_group_broadcast(Collective& it, nb::handle tensors, nb::handle options);
bool fill_group_allgather(Collective& it, nb::handle output, nb::handle source, nb::handle options);

// Comm has run_if() and start_if(), which take what fills a Collective in. Gives None where the
// call is done, a Request where it is under way, False where it is anything else.
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
