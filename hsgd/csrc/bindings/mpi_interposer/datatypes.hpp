// Translates MPI's datatypes and ops for the core.
//
// Finds the core's dtype and op of a handle if they exist, sizes in bytes, and whether elements are
// packed in memory. Keeps no state; calls PMPI_* only.
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
// Returns the core's dtype or op; for predefined handles only.
std::optional<hsgd_dtype> known_dtype(MPI_Datatype type);

// Returns the data bytes of one element; nothing for an invalid datatype.
std::optional<uint64_t> size_of(MPI_Datatype type);

// The elements of one call, as one rank describes them.
struct TypeLayout {
  MPI_Datatype type;
  uint64_t size;   // bytes of data of one element
  int64_t extent;  // bytes from one element to the next
  bool is_packed;  // an array of them is packed in memory, from its first byte on
};

TypeLayout layout_of(MPI_Datatype type);

// Copies `count` elements between memory that the layout describes and contiguous memory.
// Throw as check() does.
void pack(const void* from, uint64_t count, const TypeLayout& layout, std::byte* to);
void unpack(const std::byte* from, void* to, uint64_t count, const TypeLayout& layout);

// Memory that is not initialized. Throws std::bad_alloc.
using Staging = std::unique_ptr<std::byte[]>;
inline Staging stage(uint64_t bytes) { return Staging(new std::byte[bytes > 0 ? bytes : 1]); }

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_DATATYPES_HPP_
