// MPI's datatypes and ops as the core sees them.
//
// Owns what a handle means: the core's dtype and op where it has them, sizes in bytes, and whether
// elements lie in memory as they would travel. Keeps nothing; calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_DATATYPES_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_DATATYPES_HPP_

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Throws std::runtime_error with MPI's words unless `status` is MPI_SUCCESS.
void check(int status, const char* what);

std::optional<hsgd_op> known_op(MPI_Op op);
// Predefined datatypes only.
std::optional<hsgd_dtype> known_dtype(MPI_Datatype type);

// Bytes of the data of one element; nothing for what is no datatype.
std::optional<uint64_t> size_of(MPI_Datatype type);

// Elements of one call, as one rank describes them.
struct TypeLayout {
  MPI_Datatype type;
  uint64_t size;   // bytes of data of one element
  int64_t extent;  // bytes from one element to the next
  bool is_packed;  // an array of them lies in memory as it would travel, from its first byte on
};

TypeLayout layout_of(MPI_Datatype type);

// Copies `count` elements between memory that the layout describes and contiguous memory.
// Throw as check() does.
void pack(const void* from, uint64_t count, const TypeLayout& layout, std::byte* to);
void unpack(const std::byte* from, void* to, uint64_t count, const TypeLayout& layout);

// Memory that is not touched before it is used. Throws std::bad_alloc.
using Staging = std::unique_ptr<std::byte[]>;
inline Staging stage(uint64_t bytes) { return Staging(new std::byte[bytes > 0 ? bytes : 1]); }

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_DATATYPES_HPP_
