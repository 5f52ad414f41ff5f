// The arithmetic of NCCL's reductions, in the order of the ranks.
//
// Owns the sizes of its types and the formats of 16-bit floats, which are summed in float32.
#ifndef SIMCUDA_NCCL_REDUCTION_HPP_
#define SIMCUDA_NCCL_REDUCTION_HPP_

#include <cstddef>
#include <vector>

#include "nccl_types.hpp"

namespace simnccl {

// 0: an unknown type.
size_t type_bytes(ncclDataType_t type);

// to[i] = parts[0][i] op parts[1][i] op ...; `to` may be none of the parts.
void reduce(const std::vector<const std::byte*>& parts, std::byte* to, size_t count,
            ncclDataType_t type, ncclRedOp_t op);

}  // namespace simnccl

#endif  // SIMCUDA_NCCL_REDUCTION_HPP_
