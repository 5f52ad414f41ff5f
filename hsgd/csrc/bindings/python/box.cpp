// The Python binding of the parameter box: one class, no logic.
#include "onesided/box/box.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/array.hpp"
#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"

namespace hsgd::python {
namespace {

class Box {
  template <class Call>
  auto call(Call&& call) const {
    const std::shared_ptr<hsgd::Box> box = box_;  // a copy, because another thread may close it
    if (box == nullptr) raise_closed("ParameterBox");
    return without_gil([&] { return call(*box); });
  }

 public:
  static Box create(const std::string& key, uint64_t count, nb::handle initial,
                    uint64_t chunk_count, uint32_t counters) {
    std::unique_ptr<Array> values;
    const float* data = nullptr;
    if (!initial.is_none()) {
      values = std::make_unique<Array>(initial, "ParameterBox", false);
      check(*values, "ParameterBox", count, false);
      data = static_cast<const float*>(values->data());
    }
    const BoxPlan plan{count, chunk_count, counters};
    return Box(without_gil([&] { return hsgd::Box::create(key, plan, data); }));
  }

  static Box attach(const std::string& key, double timeout_s) {
    return Box(without_gil([&] { return hsgd::Box::attach(key, patience(timeout_s)); }));
  }

  uint64_t read(nb::handle out, uint64_t offset, double timeout_s) {
    const Array array(out, "read, out", true);
    check(array, "read, out", array.count(), false);
    return call([&](hsgd::Box& box) {
      const uint64_t version = box.version();
      box.read(static_cast<float*>(array.data()), offset, array.count(), patience(timeout_s));
      return version;
    });
  }

  uint64_t write(nb::handle values, uint64_t offset, double timeout_s, bool finishes) {
    const Array array(values, "write", false);
    check(array, "write", array.count(), false);
    return call([&](hsgd::Box& box) {
      return box.write(static_cast<const float*>(array.data()), offset, array.count(), finishes,
                       patience(timeout_s));
    });
  }

  uint64_t accumulate(nb::handle delta, uint64_t offset, double timeout_s) {
    const Array array(delta, "accumulate", false);
    check(array, "accumulate", array.count(), true);
    return call([&](hsgd::Box& box) {
      return box.accumulate(array.data(), array.dtype(), offset, array.count(), nullptr, true,
                            patience(timeout_s));
    });
  }

  // Adds the values in `bytes`: float32 or bfloat16. `sums`: None, or receives the new values.
  uint64_t accumulate_part(nb::handle bytes, bool narrow, uint64_t offset, nb::handle sums,
                           double timeout_s, bool finishes) {
    const Array array(bytes, "accumulate", false);
    const hsgd_dtype dtype = narrow ? HSGD_BFLOAT16 : HSGD_FLOAT32;
    const uint64_t count =
        array.count() * hsgd_dtype_bytes(array.dtype()) / hsgd_dtype_bytes(dtype);
    std::unique_ptr<Array> out;
    if (!sums.is_none()) {
      out = std::make_unique<Array>(sums, "accumulate, sums", true);
      check(*out, "accumulate, sums", count, false);
    }
    return call([&](hsgd::Box& box) {
      return box.accumulate(array.data(), dtype, offset, count,
                            out ? static_cast<float*>(out->data()) : nullptr, finishes,
                            patience(timeout_s));
    });
  }

  void take_copy(nb::handle values, uint64_t offset, uint64_t stamp, uint64_t version,
                 double timeout_s) {
    const Array array(values, "take_copy", false);
    check(array, "take_copy", array.count(), false);
    call([&](hsgd::Box& box) {
      box.take_copy(static_cast<const float*>(array.data()), offset, array.count(), stamp, version,
                    patience(timeout_s));
    });
  }

  // Throws the errors of write() and accumulate(); returns true if the values are bfloat16.
  bool check_change(const std::string& what, nb::handle values, uint64_t offset) const {
    const Array array(values, what.c_str(), false);
    check(array, what.c_str(), array.count(), what == "accumulate");
    call([&](hsgd::Box& box) { box.check_range(what.c_str(), offset, array.count()); });
    return array.dtype() == HSGD_BFLOAT16;
  }

  std::pair<uint64_t, double> elastic(const std::vector<nb::object>& weights, float rate,
                                      nb::handle delta, double timeout_s) {
    std::deque<Array> arrays;  // a deque, whose elements do not move
    std::vector<hsgd::Box::Tensor> tensors;
    uint64_t count = 0;
    for (const nb::object& tensor : weights) {
      const Array& array = arrays.emplace_back(tensor, "elastic", true);
      check(array, "elastic", array.count(), false);
      tensors.push_back({static_cast<float*>(array.data()), array.count()});
      count += array.count();
    }
    std::unique_ptr<Array> out;
    if (!delta.is_none()) {
      out = std::make_unique<Array>(delta, "elastic, delta", true);
      check(*out, "elastic, delta", count, true);
    }
    return call([&](hsgd::Box& box) {
      const uint64_t version = box.version();
      const double square = box.elastic(tensors, rate, out ? out->data() : nullptr,
                                        out ? out->dtype() : HSGD_FLOAT32, patience(timeout_s));
      return std::pair(version, square);
    });
  }

  int64_t fetch_add(uint32_t counter, int64_t value) {
    return call([&](hsgd::Box& box) { return box.fetch_add(counter, value); });
  }

  uint64_t count() const { return plan().count; }
  uint64_t chunk_count() const { return plan().chunk_count; }
  uint32_t counters() const { return plan().counters; }
  uint64_t version() const {
    return call([](hsgd::Box& box) { return box.version(); });
  }
  uint64_t recoveries() const {
    return call([](hsgd::Box& box) { return box.recoveries(); });
  }

  void close() {
    std::shared_ptr<hsgd::Box> box = std::move(box_);
    box_ = nullptr;
    const ReleasedGil released;
    box.reset();
  }
  bool closed() const { return box_ == nullptr; }

 private:
  // A forked child does not have the thread that answers requests for the box.
  explicit Box(std::unique_ptr<hsgd::Box> box)
      : box_(box.release(), [](hsgd::Box* held) {
          if (held->is_mine()) delete held;
        }) {}

  static Deadline patience(double timeout_s) {
    return hsgd::Box::patience(timeout_s, python_interrupted);
  }

  static void check(const Array& array, const char* what, uint64_t count, bool narrow_too) {
    if (array.dtype() != HSGD_FLOAT32 && !(narrow_too && array.dtype() == HSGD_BFLOAT16)) {
      throw nb::type_error((std::string(what) + ": dtype " + hsgd_dtype_name(array.dtype()) +
                            "; a box takes " + (narrow_too ? "float32 and bfloat16" : "float32"))
                               .c_str());
    }
    if (array.count() == count) return;
    throw nb::value_error((std::string(what) + ": " + std::to_string(array.count()) +
                           " values, but " + std::to_string(count) + " are needed")
                              .c_str());
  }

  BoxPlan plan() const {
    return call([](hsgd::Box& box) { return box.plan(); });
  }

  std::shared_ptr<hsgd::Box> box_;
};

}  // namespace

void bind_box(nb::module_& module) {
  nb::class_<Box>(module, "Box")
      .def_static("create", &Box::create, nb::arg("key"), nb::arg("count"),
                  nb::arg("initial").none(), nb::arg("chunk_count"), nb::arg("counters"))
      .def_static("attach", &Box::attach, nb::arg("key"), nb::arg("timeout_s"))
      .def("read", &Box::read, nb::arg("out"), nb::arg("offset"), nb::arg("timeout_s"))
      .def("write", &Box::write, nb::arg("values"), nb::arg("offset"), nb::arg("timeout_s"),
           nb::arg("finishes"))
      .def("accumulate", &Box::accumulate, nb::arg("delta"), nb::arg("offset"),
           nb::arg("timeout_s"))
      .def("accumulate_part", &Box::accumulate_part, nb::arg("part"), nb::arg("narrow"),
           nb::arg("offset"), nb::arg("sums").none(), nb::arg("timeout_s"), nb::arg("finishes"))
      .def("take_copy", &Box::take_copy, nb::arg("values"), nb::arg("offset"), nb::arg("stamp"),
           nb::arg("version"), nb::arg("timeout_s"))
      .def("check_change", &Box::check_change, nb::arg("what"), nb::arg("values"),
           nb::arg("offset"))
      .def("elastic", &Box::elastic, nb::arg("weights"), nb::arg("rate"), nb::arg("delta").none(),
           nb::arg("timeout_s"))
      .def("fetch_add", &Box::fetch_add, nb::arg("counter"), nb::arg("value"))
      .def("count", &Box::count)
      .def("chunk_count", &Box::chunk_count)
      .def("counters", &Box::counters)
      .def("version", &Box::version)
      .def("recoveries", &Box::recoveries)
      .def("close", &Box::close)
      .def("closed", &Box::closed);
}

}  // namespace hsgd::python
