// The Python binding of lossy compression: four functions, no logic.
#include "core/kernels/compression.hpp"

#include "bindings/python/bindings.hpp"
#include "bindings/python/errors.hpp"

namespace hsgd::python {
namespace {

// Addresses of host memory. The caller has checked dtypes, sizes and strides, and keeps the memory
// until the call returns.
template <class Number>
Number* at(uintptr_t address) {
  return reinterpret_cast<Number*>(address);
}

void encode_int8(uintptr_t values, uintptr_t error, uintptr_t codes, uintptr_t scales,
                 uint64_t count, uint64_t block) {
  without_gil([&] {
    int8_encode(at<const float>(values), at<float>(error),
                {at<int8_t>(codes), at<float>(scales), count, block});
  });
}

void decode_int8(uintptr_t codes, uintptr_t scales, uint64_t count, uint64_t block, float factor,
                 uintptr_t sum) {
  without_gil([&] {
    int8_decode({at<int8_t>(codes), at<float>(scales), count, block}, factor, at<float>(sum));
  });
}

void encode_top(uintptr_t values, uintptr_t error, float decay, uintptr_t places, uintptr_t sent,
                uint64_t count, uint64_t chunk, uint64_t kept) {
  without_gil([&] {
    top_encode(at<const float>(values), at<float>(error), decay,
               {at<uint16_t>(places), at<uint16_t>(sent), count, chunk, kept});
  });
}

void decode_top(uintptr_t places, uintptr_t values, uint64_t count, uint64_t chunk, uint64_t kept,
                float factor, uintptr_t sum) {
  without_gil([&] {
    top_decode({at<uint16_t>(places), at<uint16_t>(values), count, chunk, kept}, factor,
               at<float>(sum));
  });
}

}  // namespace

void bind_compression(nb::module_& module) {
  module.def("int8_encode", &encode_int8, nb::arg("values"), nb::arg("error"), nb::arg("codes"),
             nb::arg("scales"), nb::arg("count"), nb::arg("block"));
  module.def("int8_decode", &decode_int8, nb::arg("codes"), nb::arg("scales"), nb::arg("count"),
             nb::arg("block"), nb::arg("factor"), nb::arg("total"));
  module.def("top_encode", &encode_top, nb::arg("values"), nb::arg("error"), nb::arg("decay"),
             nb::arg("places"), nb::arg("sent"), nb::arg("count"), nb::arg("chunk"),
             nb::arg("kept"));
  module.def("top_decode", &decode_top, nb::arg("places"), nb::arg("values"), nb::arg("count"),
             nb::arg("chunk"), nb::arg("kept"), nb::arg("factor"), nb::arg("total"));
}

}  // namespace hsgd::python
