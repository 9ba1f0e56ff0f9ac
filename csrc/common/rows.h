// Vector loads of one row of logits; the dtype is chosen once per row.
#pragma once

#include <cstdint>

#include "common/simd_float.h"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

// Lanes at or beyond `end` read as -inf, like a masked token.
template <Dtype D>
inline Vec load_logits(const char* data, std::int64_t v, std::int64_t end) {
  if (v + Vec::kLanes <= end) {
    if constexpr (D == Dtype::f32) {
      return load_f32(reinterpret_cast<const float*>(data) + v);
    } else if constexpr (D == Dtype::bf16) {
      return load_bf16(reinterpret_cast<const std::uint16_t*>(data) + v);
    } else {
      return load_f16(reinterpret_cast<const std::uint16_t*>(data) + v);
    }
  }
  double lanes[Vec::kLanes];
  const Row row{data, D};
  for (int i = 0; i < Vec::kLanes; ++i) lanes[i] = v + i < end ? row.at(v + i) : -HUGE_VAL;
  return Vec::load(lanes);
}

// The same as floats, in which every dtype is exact. All lanes must lie in the row.
template <Dtype D>
inline Flt load_whole(const char* data, std::int64_t v) {
  if constexpr (D == Dtype::f32) {
    return load_float_f32(reinterpret_cast<const float*>(data) + v);
  } else if constexpr (D == Dtype::bf16) {
    return load_float_bf16(reinterpret_cast<const std::uint16_t*>(data) + v);
  } else {
    return load_float_f16(reinterpret_cast<const std::uint16_t*>(data) + v);
  }
}

template <Dtype D>
inline Flt load_floats(const char* data, std::int64_t v, std::int64_t end) {
  if (v + Flt::kLanes <= end) return load_whole<D>(data, v);
  float lanes[Flt::kLanes];
  const Row row{data, D};
  for (int i = 0; i < Flt::kLanes; ++i) {
    lanes[i] = v + i < end ? static_cast<float>(row.at(v + i)) : -HUGE_VALF;
  }
  return Flt::load(lanes);
}

template <Dtype D>
constexpr std::int64_t kElementSize = D == Dtype::f32 ? 4 : 2;

// The logits of a row from v on, and -inf past its end.
template <Dtype D>
ADAPMIXED_INLINE inline Quad load_quad(const char* data, std::int64_t v, std::int64_t end) {
  Quad z;
  ADAPMIXED_UNROLL
  for (int k = 0; k < Quad::kSize; ++k) {
    __builtin_prefetch(data + (v + 32 * Quad::kLanes + k * Flt::kLanes) * kElementSize<D>);
    z.v[k] = load_floats<D>(data, v + k * Flt::kLanes, end);
  }
  return z;
}

inline std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

ADAPMIXED_CORE_END
