// allreduce_by_user_op(): gathers, then folds.
#include "bindings/mpi_interposer/user_op.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "bindings/mpi_interposer/datatypes.hpp"

namespace hsgd::pmpi {
namespace {

// Memory for `count` elements of a datatype, which may begin before or behind their address.
class Scratch {
 public:
  Scratch(const TypeLayout& layout, uint64_t count) {
    MPI_Aint begin = 0;
    MPI_Aint extent = 0;
    PMPI_Type_get_true_extent(layout.type, &begin, &extent);
    const int64_t steps = layout.extent * static_cast<int64_t>(count - 1);
    const int64_t lowest = begin + std::min<int64_t>(0, steps);
    memory_ = stage(static_cast<uint64_t>(extent + std::max(steps, -steps)));
    elements_ = memory_.get() - lowest;
  }
  void* elements() const { return elements_; }

 private:
  Staging memory_;
  std::byte* elements_;
};

}  // namespace

bool is_user_op(MPI_Op op) {
  const MPI_Op predefined[] = {
      MPI_OP_NULL, MPI_MAX,  MPI_MIN,  MPI_SUM,    MPI_PROD,   MPI_LAND,    MPI_BAND,  MPI_LOR,
      MPI_BOR,     MPI_LXOR, MPI_BXOR, MPI_MINLOC, MPI_MAXLOC, MPI_REPLACE, MPI_NO_OP,
  };
  return std::find(std::begin(predefined), std::end(predefined), op) == std::end(predefined);
}

int allreduce_by_user_op(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                         MPI_Datatype type, MPI_Op op, hsgd_error* error) {
  const TypeLayout layout = layout_of(type);
  const uint64_t bytes = count * layout.size;
  hsgd_topology place;
  hsgd_comm_topology(comm, &place);
  const auto ranks = static_cast<size_t>(place.size);
  const Staging gathered = stage(bytes * ranks);
  const auto input_of = [&](size_t rank) { return gathered.get() + rank * bytes; };
  std::byte* const own = input_of(static_cast<size_t>(place.rank));
  const void* mine = in == MPI_IN_PLACE ? out : in;
  if (!layout.is_packed) {
    pack(mine, count, layout, own);
    mine = own;
  }
  const std::vector<uint64_t> counts(ranks, bytes);
  const int code =
      hsgd_comm_allgather(comm, mine, gathered.get(), counts.data(), HSGD_UINT8, nullptr, error);
  if (code != HSGD_OK) return code;
  unpack(input_of(ranks - 1), out, count, layout);
  const std::optional<Scratch> scratch =
      layout.is_packed ? std::nullopt : std::make_optional<Scratch>(layout, count);
  for (size_t rank = ranks - 1; rank-- > 0;) {
    const void* left = input_of(rank);
    if (scratch) {
      unpack(input_of(rank), scratch->elements(), count, layout);
      left = scratch->elements();
    }
    check(PMPI_Reduce_local(left, out, static_cast<int>(count), type, op), "MPI_Reduce_local");
  }
  return HSGD_OK;
}

}  // namespace hsgd::pmpi
