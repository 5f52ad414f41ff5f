// Reductions of all types, element by element.
#include "reduction.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace simnccl {
namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// IEEE 754 binary16.
struct Float16 {
  uint16_t bits;

  explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = bits >> 10 & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0x1f) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -small : small;
  }

  // To nearest, ties to even. Adding a power of two lets the hardware round where the result is
  // subnormal: its last bit then stands for 2^-24.
  static Float16 of(float value) {
    const uint32_t whole = to_bits(value);
    const auto sign = static_cast<uint16_t>(whole >> 16 & 0x8000u);
    const uint32_t size = whole & 0x7fffffffu;
    uint32_t half = 0;
    if (size > 0x7f800000u) {
      half = 0x7e00;  // not a number
    } else if (size >= 0x477ff000u) {
      half = 0x7c00;  // 65520 and more
    } else if (size < 0x38800000u) {
      half = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
    } else {
      half = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    return {static_cast<uint16_t>(sign | half)};
  }
};

// The upper half of a float32.
struct Bfloat16 {
  uint16_t bits;

  explicit operator float() const { return from_bits(static_cast<uint32_t>(bits) << 16); }

  static Bfloat16 of(float value) {
    const uint32_t whole = to_bits(value);
    if ((whole & 0x7fffffffu) > 0x7f800000u)
      return {static_cast<uint16_t>(whole >> 16 | 0x40u)};  // stays not a number
    return {static_cast<uint16_t>((whole + 0x7fffu + (whole >> 16 & 1u)) >> 16)};
  }
};

// Whole numbers are summed as unsigned ones, which wrap.
template <typename Type>
Type combine(Type left, Type right, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      if constexpr (std::is_integral_v<Type>) {
        return static_cast<Type>(static_cast<uint64_t>(left) * static_cast<uint64_t>(right));
      } else {
        return left * right;
      }
    case ncclMax:
      return std::max(left, right);
    case ncclMin:
      return std::min(left, right);
    default:
      if constexpr (std::is_integral_v<Type>) {
        return static_cast<Type>(static_cast<uint64_t>(left) + static_cast<uint64_t>(right));
      } else {
        return left + right;
      }
  }
}

// `Sum`: what elements are combined in.
template <typename Type, typename Sum, typename Store>
void reduce_as(const std::vector<const std::byte*>& parts, std::byte* to, size_t count,
               ncclRedOp_t op, const Store& store) {
  auto* target = reinterpret_cast<Type*>(to);
  for (size_t k = 0; k < count; ++k) {
    auto sum = static_cast<Sum>(reinterpret_cast<const Type*>(parts[0])[k]);
    for (size_t part = 1; part < parts.size(); ++part) {
      sum = combine(sum, static_cast<Sum>(reinterpret_cast<const Type*>(parts[part])[k]), op);
    }
    if (op == ncclAvg) sum = static_cast<Sum>(sum / static_cast<Sum>(parts.size()));
    target[k] = store(sum);
  }
}

template <typename Type>
void reduce_plain(const std::vector<const std::byte*>& parts, std::byte* to, size_t count,
                  ncclRedOp_t op) {
  reduce_as<Type, Type>(parts, to, count, op, [](Type value) { return value; });
}

}  // namespace

size_t type_bytes(ncclDataType_t type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type < ncclInt8 || type > ncclBfloat16 ? 0 : kBytes[type];
}

void reduce(const std::vector<const std::byte*>& parts, std::byte* to, size_t count,
            ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return reduce_plain<int8_t>(parts, to, count, op);
    case ncclUint8:
      return reduce_plain<uint8_t>(parts, to, count, op);
    case ncclInt32:
      return reduce_plain<int32_t>(parts, to, count, op);
    case ncclUint32:
      return reduce_plain<uint32_t>(parts, to, count, op);
    case ncclInt64:
      return reduce_plain<int64_t>(parts, to, count, op);
    case ncclUint64:
      return reduce_plain<uint64_t>(parts, to, count, op);
    case ncclFloat16:
      return reduce_as<Float16, float>(parts, to, count, op, Float16::of);
    case ncclFloat32:
      return reduce_plain<float>(parts, to, count, op);
    case ncclFloat64:
      return reduce_plain<double>(parts, to, count, op);
    case ncclBfloat16:
      return reduce_as<Bfloat16, float>(parts, to, count, op, Bfloat16::of);
  }
}

}  // namespace simnccl
