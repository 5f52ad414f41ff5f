// The Python module: its structures and functions. Each bound class checks dtype, contiguity and
// shape, releases the GIL and calls the core once; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"
#include "bindings/python/group_calls.hpp"
#include "core/kernels/weighted_sum.hpp"
#include "hsgd_core.h"

namespace nb = nanobind;

namespace hsgd::python {
namespace {

// Returns the state shared by all communicators of this process; a forked child has its own.
hsgd_process* this_process() {
  static int owner = 0;
  static hsgd_process* process = nullptr;
  if (owner != ::getpid()) {
    process = hsgd_process_create();
    owner = ::getpid();
  }
  return process;
}

void bind_structures(nb::module_& module) {
  nb::class_<Options>(module, "Options")
      .def(nb::init<>())
      .def_rw("nontemporal", &hsgd_options::nontemporal)
      .def_rw("known_store", &hsgd_options::known_store)
      .def_rw("known_allreduce_bytes", &hsgd_options::known_allreduce_bytes)
      .def_rw("timeout_s", &hsgd_options::timeout_s)
      .def_rw("oneshot_bytes", &hsgd_options::oneshot_bytes)
      .def_rw("chunk_bytes", &hsgd_options::chunk_bytes)
      .def_rw("wire_oneshot_bytes", &hsgd_options::wire_oneshot_bytes)
      .def_rw("wire_dtype", &hsgd_options::wire_dtype)
      .def_rw("wire_chunk_bytes", &hsgd_options::wire_chunk_bytes)
      .def_rw("wire_radix", &hsgd_options::wire_radix)
      .def_rw("flat_ranks", &hsgd_options::flat_ranks)
      .def_rw("near_nic", &hsgd_options::near_nic)
      .def_rw("comm_id", &hsgd_options::comm_id)
      .def_rw("slots", &hsgd_options::slots)
      .def_rw("spin", &hsgd_options::spin)
      .def_rw("min_bytes", &hsgd_options::min_bytes)
      .def_rw("report", &hsgd_options::report)
      .def_prop_rw(
          "rank_names", [](const Options& self) { return self.names; },
          [](Options& self, std::vector<int32_t> names) {
            self.names = std::move(names);
            self.rank_names = self.names.data();
          });

  nb::class_<hsgd_counters>(module, "Counters")
      .def_ro("calls", &hsgd_counters::calls)
      .def_ro("payload_bytes", &hsgd_counters::payload_bytes)
      .def_ro("intra_bytes", &hsgd_counters::intra_bytes)
      .def_ro("inter_bytes_sent", &hsgd_counters::inter_bytes_sent)
      .def_ro("inter_bytes_received", &hsgd_counters::inter_bytes_received)
      .def_ro("wait_ns", &hsgd_counters::wait_ns)
      .def_ro("total_ns", &hsgd_counters::total_ns);

  nb::class_<hsgd_topology>(module, "Topology")
      .def_ro("rank", &hsgd_topology::rank)
      .def_ro("size", &hsgd_topology::size)
      .def_ro("local_rank", &hsgd_topology::local_rank)
      .def_ro("local_size", &hsgd_topology::local_size)
      .def_ro("node_rank", &hsgd_topology::node_rank)
      .def_ro("node_count", &hsgd_topology::node_count)
      .def_ro("leaders", &hsgd_topology::leaders)
      .def_ro("nontemporal", &hsgd_topology::nontemporal)
      .def_ro("oneshot_bytes", &hsgd_topology::oneshot_bytes)
      .def_ro("chunk_bytes", &hsgd_topology::chunk_bytes)
      .def_ro("allreduce_bytes", &hsgd_topology::allreduce_bytes);
}

}  // namespace

Options::Options() : hsgd_options{} {
  hsgd_options_default(this);
  process = this_process();
  interrupted = python_interrupted;
}

}  // namespace hsgd::python

NB_MODULE(_native, module) {
  // References in the frames of a failed program at its end are no concern of its user.
  nb::set_leak_warnings(false);
  hsgd::python::bind_structures(module);
  hsgd::python::bind_comm(module);
  hsgd::python::bind_box(module);
  hsgd::python::bind_tree(module);
  hsgd::python::bind_device(module);
  hsgd::python::bind_window(module);
  hsgd::python::bind_lars(module);
  hsgd::python::bind_weight_drift(module);
  hsgd::python::bind_compression(module);
  module.attr("LEAST_BUCKET_BYTES") = hsgd::python::kLeastBucketBytes;
  // Addresses: the caller has checked the arrays, and keeps them.
  module.def(
      "stream_copy",
      [](uintptr_t to, uintptr_t from, uint64_t bytes) {
        hsgd_stream_copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
      },
      nb::arg("to"), nb::arg("from_"), nb::arg("nbytes"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "average",
      [](const std::vector<uintptr_t>& inputs, uintptr_t out, uint64_t count, int dtype) {
        std::vector<const void*> in(inputs.size());
        std::transform(inputs.begin(), inputs.end(), in.begin(),
                       [](uintptr_t address) { return reinterpret_cast<const void*>(address); });
        hsgd::python::call_core([&](hsgd_error* error) {
          return hsgd_reduce(in.data(), static_cast<int>(in.size()), reinterpret_cast<void*>(out),
                             count, static_cast<hsgd_dtype>(dtype), HSGD_MEAN, error);
        });
      },
      nb::arg("inputs"), nb::arg("out"), nb::arg("count"), nb::arg("dtype"));
  module.def(
      "weighted_sum",
      [](uintptr_t words, uintptr_t weights, uint64_t count) {
        return hsgd::weighted_sum(reinterpret_cast<const int32_t*>(words),
                                  reinterpret_cast<const int64_t*>(weights), count);
      },
      nb::arg("words"), nb::arg("weights"), nb::arg("count"),
      nb::call_guard<nb::gil_scoped_release>());
  module.def("simd_name", [] { return std::string(hsgd_simd_name()); });
  nb::class_<hsgd_allreduce_plan>(module, "AllreducePlan")
      .def_ro("memory_bytes", &hsgd_allreduce_plan::memory_bytes)
      .def_ro("steps", &hsgd_allreduce_plan::steps)
      .def_ro("step_bytes", &hsgd_allreduce_plan::step_bytes)
      .def_ro("leaders", &hsgd_allreduce_plan::leaders)
      .def_ro("rounds", &hsgd_allreduce_plan::rounds)
      .def_ro("messages", &hsgd_allreduce_plan::messages);
  module.def(
      "plan_allreduce",
      [](const hsgd::python::Options& options, int nodes, int ranks_per_node, uint64_t nbytes) {
        hsgd_allreduce_plan plan{};
        hsgd::python::call_core([&](hsgd_error* error) {
          return hsgd_plan_allreduce(&options, nodes, ranks_per_node, nbytes, &plan, error);
        });
        return plan;
      },
      nb::arg("options"), nb::arg("nodes"), nb::arg("ranks_per_node"), nb::arg("nbytes"));
  module.def("end_program", &hsgd::python::end_program);
  module.def("usable_cores", &hsgd_usable_cores);
  module.def("memory_limit_bytes", [] {
    const uint64_t limit = hsgd_memory_limit_bytes();
    return limit == UINT64_MAX ? std::nullopt : std::optional<uint64_t>(limit);
  });
}
