// torch.ops.hsgd on CPU tensors, over torch's stable ABI: one library for all torch from 2.10 on.
//
// Translates tensors into calls of the core. The schemas and the gradients are in hsgd/operators.
// All functions run without the GIL.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/torch_operators/registry.hpp"
#include "hsgd_core.h"

namespace hsgd::operators {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void refuse(const std::string& line) { throw std::runtime_error(line); }

hsgd_dtype dtype_of(const char* what, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return HSGD_FLOAT32;
    case ScalarType::Double:
      return HSGD_FLOAT64;
    case ScalarType::Half:
      return HSGD_FLOAT16;
    case ScalarType::BFloat16:
      return HSGD_BFLOAT16;
    case ScalarType::Char:
      return HSGD_INT8;
    case ScalarType::Int:
      return HSGD_INT32;
    case ScalarType::Long:
      return HSGD_INT64;
    case ScalarType::Byte:
      return HSGD_UINT8;
    default:
      refuse(std::string(what) + ": dtype is " + torch::headeronly::toString(tensor.scalar_type()) +
             "; use float32, float64, float16, bfloat16, int8, int32, int64 or uint8");
  }
}

hsgd_op op_of(const char* what, const std::string& name) {
  for (int op = 0; op < HSGD_OP_COUNT; ++op) {
    if (name == hsgd_op_name(static_cast<hsgd_op>(op))) return static_cast<hsgd_op>(op);
  }
  refuse(std::string(what) + ": op is '" + name + "'; use sum, mean, min, max or prod");
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

int64_t rows_of(const std::vector<int64_t>& shape) { return shape.empty() ? 1 : shape.front(); }

// One collective, with the data that its description points to.
struct Collective {
  Collective(const char* what, int64_t number, const Tensor& source)
      : what(what), comm(comm_of(number)), shape(shape_of(source)) {
    hsgd_comm_topology(comm.get(), &topology);
    call.in = source.data_ptr();
    call.count = static_cast<uint64_t>(source.numel());
    call.dtype = dtype_of(what, source);
    call.label = &label;
    label = {nullptr, shape.data(), static_cast<int32_t>(shape.size())};
  }
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  void run() const {
    hsgd_error error;
    if (hsgd_comm_run(comm.get(), &call, &error) != HSGD_OK) refuse(error.message);
  }

  const char* const what;
  const std::shared_ptr<hsgd_comm> comm;
  std::vector<int64_t> shape;
  hsgd_topology topology{};
  hsgd_label label{};
  hsgd_call call{};
};

Tensor dense_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

void copy_back(const Tensor& dense, Tensor tensor) {
  if (dense.get() != tensor.get()) torch::stable::copy_(tensor, dense);
}

// Checks that `out` has the source's dtype and the given shape.
void check_out(const char* what, const Tensor& out, const Tensor& source,
               const std::vector<int64_t>& shape) {
  if (out.scalar_type() == source.scalar_type() && shape_of(out) == shape) return;
  refuse(std::string(what) + ": out has another dtype or shape than the result");
}

// Reduces `source` into `target`; both are dense.
void reduce(const char* what, const Tensor& source, const Tensor& target, int64_t number,
            const std::string& op) {
  Collective it(what, number, source);
  it.call.kind = HSGD_ALLREDUCE;
  it.call.out = target.data_ptr();
  it.call.op = op_of(what, op);
  it.run();
}

void allreduce_into(const Tensor& out, const Tensor& tensor, int64_t number,
                    const std::string& op) {
  const Tensor source = dense_of(tensor);
  check_out("allreduce", out, source, shape_of(source));
  const Tensor target = dense_of(out);
  reduce("allreduce", source, target, number, op);
  copy_back(target, out);
}

void allreduce_in_place(const Tensor& tensor, int64_t number, const std::string& op) {
  const Tensor dense = dense_of(tensor);
  reduce("allreduce_", dense, dense, number, op);
  copy_back(dense, tensor);
}

void broadcast_in_place(const Tensor& tensor, int64_t root, int64_t number) {
  const Tensor dense = dense_of(tensor);
  Collective it("broadcast_", number, dense);
  if (root < 0 || root >= it.topology.size) {
    refuse("broadcast_: root is " + std::to_string(root) + ", ranks are 0 to " +
           std::to_string(it.topology.size - 1));
  }
  it.call.kind = HSGD_BROADCAST;
  it.call.out = dense.data_ptr();
  it.call.root = static_cast<int>(root);
  it.run();
  copy_back(dense, tensor);
}

// The output for the rows of all ranks, the same number on each.
struct Joined {
  const void* target;
  uint64_t rows;
  int rank, size;
};

void* place_joined(void* context, const uint64_t* rows, hsgd_error* error) {
  const auto& joined = *static_cast<const Joined*>(context);
  for (int rank = 0; rank < joined.size; ++rank) {
    if (rows[rank] == joined.rows) continue;
    const std::string line = "allgather: rank " + std::to_string(rank) + " has " +
                             std::to_string(rows[rank]) + " rows, rank " +
                             std::to_string(joined.rank) + " has " + std::to_string(joined.rows) +
                             "; torch.ops.hsgd needs the same number of rows on every rank";
    error->code = HSGD_ERR_ARGUMENT;
    error->rank = rank;
    error->message[line.copy(error->message, sizeof error->message - 1)] = '\0';
    return nullptr;
  }
  return const_cast<void*>(joined.target);
}

void allgather_into(const Tensor& out, const Tensor& tensor, int64_t number) {
  const Tensor source = dense_of(tensor);
  Collective it("allgather", number, source);
  const auto rows = static_cast<uint64_t>(rows_of(it.shape));
  if (it.shape.empty()) it.shape.resize(1);
  it.shape.front() = static_cast<int64_t>(rows) * it.topology.size;
  check_out("allgather", out, source, it.shape);
  const Tensor target = dense_of(out);
  Joined joined{target.data_ptr(), rows, it.topology.rank, it.topology.size};
  it.call.kind = HSGD_ALLGATHER_ROWS;
  it.call.count = rows;
  it.call.row_elements = 1;
  for (size_t dim = 1; dim < it.shape.size(); ++dim) {
    it.call.row_elements *= static_cast<uint64_t>(it.shape[dim]);
  }
  // The ranks exchange the numbers of rows; the label holds the other extents.
  it.shape.front() = -1;
  it.label.shape = it.shape.data();
  it.label.ndim = static_cast<int32_t>(it.shape.size());
  it.call.place = place_joined;
  it.call.context = &joined;
  it.run();
  copy_back(target, out);
}

void reduce_scatter_into(const Tensor& out, const Tensor& tensor, int64_t number,
                         const std::string& op) {
  const Tensor source = dense_of(tensor);
  Collective it("reduce_scatter", number, source);
  const int64_t size = it.topology.size;
  if (it.shape.empty() || it.shape.front() % size != 0) {
    refuse("reduce_scatter: " + std::to_string(rows_of(it.shape)) +
           " rows cannot be split evenly over " + std::to_string(size) + " ranks");
  }
  std::vector<int64_t> shape = it.shape;
  shape.front() /= size;
  check_out("reduce_scatter", out, source, shape);
  const Tensor target = dense_of(out);
  const std::vector<uint64_t> counts(static_cast<size_t>(size),
                                     it.call.count / static_cast<uint64_t>(size));
  it.call.kind = HSGD_REDUCE_SCATTER;
  it.call.out = target.data_ptr();
  it.call.counts = counts.data();
  it.call.op = op_of("reduce_scatter", op);
  it.run();
  copy_back(target, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hsgd, CPU, library) {
  library.impl("allreduce_", TORCH_BOX(&allreduce_in_place));
  library.impl("broadcast_", TORCH_BOX(&broadcast_in_place));
  library.impl("allreduce_into", TORCH_BOX(&allreduce_into));
  library.impl("allgather_into", TORCH_BOX(&allgather_into));
  library.impl("reduce_scatter_into", TORCH_BOX(&reduce_scatter_into));
}

}  // namespace hsgd::operators
