// Translates datatypes and ops, and packs elements.
#include "bindings/mpi_interposer/datatypes.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

// Weak: the program's libmpi may have only MPI 3.
#if MPI_VERSION >= 4
#pragma weak PMPI_Type_get_envelope_c
#pragma weak PMPI_Type_get_contents_c
#endif

namespace hsgd::pmpi {
namespace {

std::optional<hsgd_dtype> signed_integer(size_t bytes) {
  if (bytes == 1) return HSGD_INT8;
  if (bytes == 4) return HSGD_INT32;
  if (bytes == 8) return HSGD_INT64;
  return std::nullopt;
}

std::optional<hsgd_dtype> floating(size_t bytes) {
  if (bytes == 4) return HSGD_FLOAT32;
  if (bytes == 8) return HSGD_FLOAT64;
  return std::nullopt;
}

// Returns the dtype of a Fortran datatype: the compiler chose its size when MPI was built.
std::optional<hsgd_dtype> known_fortran_dtype(MPI_Datatype type) {
  const bool real =
      type == MPI_REAL || type == MPI_DOUBLE_PRECISION || type == MPI_REAL4 || type == MPI_REAL8;
  const bool integer =
      type == MPI_INTEGER || type == MPI_INTEGER1 || type == MPI_INTEGER4 || type == MPI_INTEGER8;
  if (!real && !integer) return std::nullopt;
  const size_t bytes = size_of(type).value_or(0);
  return real ? floating(bytes) : signed_integer(bytes);
}

// The construction of a datatype, read in MPI 4's form if there is one: the older form is an error
// for a type with large counts. MPI raises that error on MPI_COMM_WORLD or MPI_COMM_SELF; by
// default their handler ends the job, whatever handler the call's communicator has.
class Making {
 public:
  explicit Making(MPI_Datatype type) {
#if MPI_VERSION >= 4
    if (PMPI_Type_get_envelope_c != nullptr) {
      PMPI_Type_get_envelope_c(type, &integers_, &addresses_, &large_, &types_, &combiner_);
      return;
    }
#endif
    int integers = 0, addresses = 0, types = 0;
    PMPI_Type_get_envelope(type, &integers, &addresses, &types, &combiner_);
    integers_ = integers;
    addresses_ = addresses;
    types_ = types;
  }

  bool is_named() const { return combiner_ == MPI_COMBINER_NAMED; }

  // Returns the element type of a contiguous type or a copy; MPI_DATATYPE_NULL for other
  // constructions.
  MPI_Datatype only_element(MPI_Datatype type) const {
    const bool plain = combiner_ == MPI_COMBINER_CONTIGUOUS || combiner_ == MPI_COMBINER_DUP;
    if (!plain || types_ != 1 || addresses_ > 0) return MPI_DATATYPE_NULL;
    std::vector<int> integers(static_cast<size_t>(std::max<Number>(integers_, 1)));
    MPI_Aint address = 0;
    MPI_Datatype inner = MPI_DATATYPE_NULL;
#if MPI_VERSION >= 4
    if (PMPI_Type_get_contents_c != nullptr) {
      std::vector<MPI_Count> large(static_cast<size_t>(std::max<Number>(large_, 1)));
      const int status = PMPI_Type_get_contents_c(type, integers_, addresses_, large_, types_,
                                                  integers.data(), &address, large.data(), &inner);
      return status == MPI_SUCCESS ? inner : MPI_DATATYPE_NULL;
    }
#endif
    const int status =
        PMPI_Type_get_contents(type, static_cast<int>(integers_), static_cast<int>(addresses_),
                               static_cast<int>(types_), integers.data(), &address, &inner);
    return status == MPI_SUCCESS ? inner : MPI_DATATYPE_NULL;
  }

 private:
#if MPI_VERSION >= 4
  using Number = MPI_Count;
  Number large_ = 0;
#else
  using Number = int;
#endif
  Number integers_ = 0;
  Number addresses_ = 0;
  Number types_ = 0;
  int combiner_ = 0;
};

// Returns true if the elements are packed. Elements of a derived datatype may be in any order,
// overlap and leave gaps; extents do not show that. So the construction of the type decides, and
// MPI packs every type that is not known to be packed.
bool is_packed(MPI_Datatype type, uint64_t size) {
  MPI_Aint lower = 0;
  MPI_Aint extent = 0;
  PMPI_Type_get_extent(type, &lower, &extent);
  if (lower != 0 || static_cast<uint64_t>(extent) != size) return false;
  const Making making(type);
  if (making.is_named()) return true;
  MPI_Datatype inner = making.only_element(type);
  if (inner == MPI_DATATYPE_NULL) return false;
  const bool packed = is_packed(inner, size_of(inner).value_or(UINT64_MAX));
  if (!Making(inner).is_named()) PMPI_Type_free(&inner);  // a handle of our own
  return packed;
}

// Returns the number of elements at a time: MPI_Pack counts in int.
uint64_t elements_at_once(const TypeLayout& layout) {
  constexpr uint64_t kMostBytes = 1 << 30;
  if (layout.size > INT_MAX) {
    throw std::runtime_error("one element of a derived datatype holds " +
                             std::to_string(layout.size) +
                             " bytes; at most 2147483647 can be packed");
  }
  return std::max<uint64_t>(1, kMostBytes / std::max<uint64_t>(1, layout.size));
}

// Calls move(element address offset, elements, packed offset) for as many elements as fit at once.
template <class Move>
void in_pieces(uint64_t count, const TypeLayout& layout, Move&& move) {
  const uint64_t most = elements_at_once(layout);
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min(most, count - done);
    move(static_cast<int64_t>(done) * layout.extent, static_cast<int>(now), done * layout.size);
    done += now;
  }
}

}  // namespace

void check(int status, const char* what) {
  if (status == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  PMPI_Error_string(status, words, &length);
  throw std::runtime_error(std::string(what) + " failed: " + words);
}

std::optional<hsgd_op> known_op(MPI_Op op) {
  if (op == MPI_SUM) return HSGD_SUM;
  if (op == MPI_MAX) return HSGD_MAX;
  if (op == MPI_MIN) return HSGD_MIN;
  if (op == MPI_PROD) return HSGD_PROD;
  return std::nullopt;
}

std::optional<hsgd_dtype> known_dtype(MPI_Datatype type) {
  if (type == MPI_FLOAT) return HSGD_FLOAT32;
  if (type == MPI_DOUBLE) return HSGD_FLOAT64;
  if (type == MPI_INT || type == MPI_INT32_T) return HSGD_INT32;
  if (type == MPI_INT64_T || type == MPI_LONG_LONG) return HSGD_INT64;
  if (type == MPI_LONG) return signed_integer(sizeof(long));
  if (type == MPI_INT8_T || type == MPI_SIGNED_CHAR) return HSGD_INT8;
  if (type == MPI_UINT8_T || type == MPI_UNSIGNED_CHAR) return HSGD_UINT8;
  return known_fortran_dtype(type);
}

std::optional<uint64_t> size_of(MPI_Datatype type) {
  if (type == MPI_DATATYPE_NULL) return std::nullopt;
  MPI_Count size = 0;
  if (PMPI_Type_size_x(type, &size) != MPI_SUCCESS || size < 0) return std::nullopt;
  return static_cast<uint64_t>(size);
}

TypeLayout layout_of(MPI_Datatype type) {
  TypeLayout layout{type, size_of(type).value_or(0), 0, false};
  MPI_Aint lower = 0;
  MPI_Aint extent = 0;
  PMPI_Type_get_extent(type, &lower, &extent);
  layout.extent = extent;
  layout.is_packed = is_packed(type, layout.size);
  return layout;
}

void pack(const void* from, uint64_t count, const TypeLayout& layout, std::byte* to) {
  if (layout.is_packed) {
    if (count > 0) std::memcpy(to, from, count * layout.size);
    return;
  }
  in_pieces(count, layout, [&](int64_t offset, int elements, uint64_t packed) {
    int position = 0;
    const auto bytes = static_cast<int>(static_cast<uint64_t>(elements) * layout.size);
    check(PMPI_Pack(static_cast<const std::byte*>(from) + offset, elements, layout.type,
                    to + packed, bytes, &position, MPI_COMM_SELF),
          "MPI_Pack");
  });
}

void unpack(const std::byte* from, void* to, uint64_t count, const TypeLayout& layout) {
  if (layout.is_packed) {
    if (count > 0) std::memcpy(to, from, count * layout.size);
    return;
  }
  in_pieces(count, layout, [&](int64_t offset, int elements, uint64_t packed) {
    int position = 0;
    const auto bytes = static_cast<int>(static_cast<uint64_t>(elements) * layout.size);
    check(PMPI_Unpack(from + packed, bytes, &position, static_cast<std::byte*>(to) + offset,
                      elements, layout.type, MPI_COMM_SELF),
          "MPI_Unpack");
  });
}

}  // namespace hsgd::pmpi
