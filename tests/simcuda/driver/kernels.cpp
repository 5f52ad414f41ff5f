// The kernels that tests launch: a few lines of arithmetic on device memory.
#include "controls.hpp"
#include "internal.hpp"

namespace simcuda {
namespace {

constexpr size_t kSizes[] = {sizeof(float), sizeof(double), sizeof(int32_t), sizeof(int64_t)};
constexpr int kDtypes = 4;

struct Arguments {
  const char* function;
  CUdeviceptr to;
  CUdeviceptr from;
  size_t count;
  int dtype;
};

// Calls a kernel with typed pointers, for the first half of the elements and then for the second.
template <typename Type, typename Kernel>
void run_halves(const View& to, const View& from, size_t count, const Kernel& kernel) {
  auto* target = reinterpret_cast<Type*>(to.data);
  const auto* source = reinterpret_cast<const Type*>(from.data);
  const size_t half = count / 2;
  for (size_t k = 0; k < half; ++k) kernel(target[k], source[k]);
  if (half > 0) pause();
  for (size_t k = half; k < count; ++k) kernel(target[k], source[k]);
}

template <typename Kernel>
CUresult run(Context& context, const Arguments& given, const Kernel& kernel) {
  const size_t bytes = given.count * kSizes[given.dtype];
  View to;
  View from;
  const auto find = [&](CUdeviceptr pointer, View* view) {
    return translate(given.function, context, reinterpret_cast<void*>(pointer), bytes, view);
  };
  CUresult result = find(given.from, &from);
  if (result == CUDA_SUCCESS) result = find(given.to, &to);
  if (result != CUDA_SUCCESS) return result;
  if (given.dtype == 0) run_halves<float>(to, from, given.count, kernel);
  if (given.dtype == 1) run_halves<double>(to, from, given.count, kernel);
  if (given.dtype == 2) run_halves<int32_t>(to, from, given.count, kernel);
  if (given.dtype == 3) run_halves<int64_t>(to, from, given.count, kernel);
  return CUDA_SUCCESS;
}

template <typename Kernel>
CUresult launch(CUstream stream, const Arguments& given, Kernel kernel) {
  if (given.dtype < 0 || given.dtype >= kDtypes) return CUDA_ERROR_INVALID_VALUE;
  return enqueue(given.function, stream, [given, kernel](Context& context) {
    return given.count == 0 ? CUDA_SUCCESS : run(context, given, kernel);
  });
}

}  // namespace
}  // namespace simcuda

CUresult simcuda_launch_scale_add(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t count,
                                  int dtype, double a, double b) {
  return simcuda::launch(stream, {__func__, to, from, count, dtype},
                         [a, b](auto& target, const auto& source) {
                           using Type = std::remove_reference_t<decltype(target)>;
                           target = static_cast<Type>(a) * source + static_cast<Type>(b);
                         });
}

CUresult simcuda_launch_add(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t count,
                            int dtype) {
  return simcuda::launch(stream, {__func__, to, from, count, dtype},
                         [](auto& target, const auto& source) { target += source; });
}
