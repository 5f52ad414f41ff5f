#include "binding/box.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "binding/array.hpp"
#include "binding/collective_call.hpp"
#include "binding/gil.hpp"
#include "hsgd_core.h"

namespace nb = nanobind;

namespace hsgd::python {
namespace {

class Box {
 public:
  static Box create(const std::string& key, uint64_t count, nb::handle initial,
                    uint64_t chunk_count, uint32_t counters) {
    const hsgd_box_options options{sizeof(hsgd_box_options), counters, count, chunk_count};
    std::unique_ptr<Array> values;
    const float* data = nullptr;
    if (!initial.is_none()) {
      values = std::make_unique<Array>(initial, "ParameterBox", false);
      check(*values, "ParameterBox", count, false);
      data = static_cast<const float*>(values->data());
    }
    return Box([&](hsgd_box** box, hsgd_error* error) {
      return hsgd_box_create(key.c_str(), &options, data, box, error);
    });
  }

  static Box attach(const std::string& key, double timeout_s) {
    const hsgd_patience patience = patient(timeout_s);
    return Box([&](hsgd_box** box, hsgd_error* error) {
      return hsgd_box_attach(key.c_str(), &patience, box, error);
    });
  }

  uint64_t read(nb::handle out, uint64_t offset, double timeout_s) {
    const Array array(out, "read, out", true);
    check(array, "read, out", array.count(), false);
    const hsgd_patience patience = patient(timeout_s);
    uint64_t version = 0;
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_read(box, static_cast<float*>(array.data()), offset, array.count(), &patience,
                           &version, error);
    });
    return version;
  }

  uint64_t write(nb::handle values, uint64_t offset, double timeout_s, bool finishes) {
    const Array array(values, "write", false);
    check(array, "write", array.count(), false);
    const hsgd_patience patience = patient(timeout_s);
    uint64_t version = 0;
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_write(box, static_cast<const float*>(array.data()), offset, array.count(),
                            finishes, &patience, &version, error);
    });
    return version;
  }

  uint64_t accumulate(nb::handle delta, uint64_t offset, double timeout_s) {
    const Array array(delta, "accumulate", false);
    check(array, "accumulate", array.count(), true);
    return add(array.data(), array.dtype(), offset, array.count(), nullptr, timeout_s, true);
  }

  // What bytes hold: float32 or bfloat16. `sums`: None, or where the new values go.
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
    float* const told = out ? static_cast<float*>(out->data()) : nullptr;
    return add(array.data(), dtype, offset, count, told, timeout_s, finishes);
  }

  void take_copy(nb::handle values, uint64_t offset, uint64_t stamp, uint64_t version,
                 double timeout_s) {
    const Array array(values, "take_copy", false);
    check(array, "take_copy", array.count(), false);
    const hsgd_patience patience = patient(timeout_s);
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_take_copy(box, static_cast<const float*>(array.data()), offset, array.count(),
                                stamp, version, &patience, error);
    });
  }

  // Throws what write() and accumulate() would; says whether the values are bfloat16.
  bool check_change(const std::string& what, nb::handle values, uint64_t offset) const {
    const Array array(values, what.c_str(), false);
    check(array, what.c_str(), array.count(), what == "accumulate");
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_check(box, what.c_str(), offset, array.count(), error);
    });
    return array.dtype() == HSGD_BFLOAT16;
  }

  std::pair<uint64_t, double> elastic(const std::vector<nb::object>& weights, float rate,
                                      nb::handle delta, double timeout_s) {
    std::deque<Array> arrays;  // which do not move
    std::vector<hsgd_box_tensor> table;
    uint64_t count = 0;
    for (const nb::object& tensor : weights) {
      const Array& made = arrays.emplace_back(tensor, "elastic", true);
      check(made, "elastic", made.count(), false);
      table.push_back({static_cast<float*>(made.data()), made.count()});
      count += made.count();
    }
    std::unique_ptr<Array> array;
    if (!delta.is_none()) {
      array = std::make_unique<Array>(delta, "elastic, delta", true);
      check(*array, "elastic, delta", count, true);
    }
    const hsgd_patience patience = patient(timeout_s);
    std::pair<uint64_t, double> found{};
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_elastic(
          box, table.data(), table.size(), rate, array ? array->data() : nullptr,
          array ? array->dtype() : HSGD_FLOAT32, &patience, &found.second, &found.first, error);
    });
    return found;
  }

  int64_t fetch_add(uint32_t counter, int64_t value) {
    int64_t before = 0;
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_fetch_add(box, counter, value, &before, error);
    });
    return before;
  }

  hsgd_box_options describe() const {
    hsgd_box_options options{};
    call([&](hsgd_box* box, hsgd_error*) {
      hsgd_box_describe(box, &options);
      return HSGD_OK;
    });
    return options;
  }
  uint64_t count() const { return describe().count; }
  uint64_t chunk_count() const { return describe().chunk_count; }
  uint32_t counters() const { return describe().counters; }

  uint64_t version() const { return number(hsgd_box_version); }
  uint64_t recoveries() const { return number(hsgd_box_recoveries); }

  void close() {
    std::shared_ptr<hsgd_box> box = std::move(box_);
    box_ = nullptr;
    const ReleasedGil released;
    box.reset();
  }
  bool closed() const { return box_ == nullptr; }

 private:
  template <class Open>
  explicit Box(Open&& open) {
    hsgd_error error{};
    hsgd_box* box = nullptr;
    int status = 0;
    {
      const ReleasedGil released;
      status = open(&box, &error);
    }
    raise_on_error(status, error);
    box_ = std::shared_ptr<hsgd_box>(box, hsgd_box_destroy);
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

  uint64_t add(const void* delta, hsgd_dtype dtype, uint64_t offset, uint64_t count, float* sums,
               double timeout_s, bool finishes) {
    const hsgd_patience patience = patient(timeout_s);
    uint64_t version = 0;
    call([&](hsgd_box* box, hsgd_error* error) {
      return hsgd_box_accumulate(box, delta, dtype, offset, count, sums, finishes, &patience,
                                 &version, error);
    });
    return version;
  }

  static hsgd_patience patient(double timeout_s) { return {timeout_s, python_interrupted}; }

  template <class Call>
  void call(Call&& call) const {
    hsgd_error error{};
    const std::shared_ptr<hsgd_box> box = box_;  // another thread may close it
    if (box == nullptr) {
      std::snprintf(error.message, sizeof error.message, "this ParameterBox is closed");
      raise_on_error(HSGD_ERR_CLOSED, error);
    }
    int status = 0;
    {
      const ReleasedGil released;
      status = call(box.get(), &error);
    }
    raise_on_error(status, error);
  }

  uint64_t number(uint64_t (*ask)(const hsgd_box*)) const {
    uint64_t value = 0;
    call([&](hsgd_box* box, hsgd_error*) {
      value = ask(box);
      return HSGD_OK;
    });
    return value;
  }

  std::shared_ptr<hsgd_box> box_;
};

}  // namespace

void bind_box(nb::module_& module) {
  nb::class_<Box>(module, "Box")
      .def_static("create", &Box::create, nb::arg("key"), nb::arg("count"),
                  nb::arg("initial").none(), nb::arg("chunk_count"), nb::arg("counters"))
      .def_static("attach", &Box::attach, nb::arg("key"), nb::arg("timeout_s"))
      .def("read", &Box::read)
      .def("write", &Box::write)
      .def("accumulate", &Box::accumulate)
      .def("accumulate_part", &Box::accumulate_part, nb::arg("part"), nb::arg("narrow"),
           nb::arg("offset"), nb::arg("sums").none(), nb::arg("timeout_s"), nb::arg("finishes"))
      .def("take_copy", &Box::take_copy)
      .def("check_change", &Box::check_change)
      .def("elastic", &Box::elastic, nb::arg("weights"), nb::arg("rate"), nb::arg("delta").none(),
           nb::arg("timeout_s"))
      .def("fetch_add", &Box::fetch_add)
      .def("count", &Box::count)
      .def("chunk_count", &Box::chunk_count)
      .def("counters", &Box::counters)
      .def("version", &Box::version)
      .def("recoveries", &Box::recoveries)
      .def("close", &Box::close)
      .def("closed", &Box::closed);
}

}  // namespace hsgd::python
