// Rows of logits as doubles, which is exact for every accepted dtype.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/config.h"
#include "common/operators.h"

ADAPMIXED_CORE_BEGIN

ADAPMIXED_HD double bf16_to_double(std::uint16_t bits) {
  return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

ADAPMIXED_HD double f16_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double x;
  if (exponent == 31) {
    x = mantissa ? NAN : HUGE_VAL;
  } else if (exponent == 0) {
    x = std::ldexp(static_cast<double>(mantissa), -24);
  } else {
    x = std::ldexp(static_cast<double>(mantissa + 1024), exponent - 25);
  }
  return (bits >> 15) ? -x : x;
}

// Calls f with the dtype as a compile-time constant, std::integral_constant<Dtype, ...>.
template <class F>
inline void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(std::integral_constant<Dtype, Dtype::f32>{});
    case Dtype::bf16:
      return f(std::integral_constant<Dtype, Dtype::bf16>{});
    case Dtype::f16:
      return f(std::integral_constant<Dtype, Dtype::f16>{});
  }
}

ADAPMIXED_HD std::int64_t element_size(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Row (model, position) of a tensor of logits.
struct Row {
  const char* data;
  Dtype dtype;

  ADAPMIXED_HD double at(std::int64_t v) const {
    if (dtype == Dtype::f32) return reinterpret_cast<const float*>(data)[v];
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(data)[v];
    return dtype == Dtype::bf16 ? bf16_to_double(bits) : f16_to_double(bits);
  }
};

ADAPMIXED_HD Row row_of(const Logits& logits, std::int64_t model, std::int64_t position) {
  const std::int64_t offset = model * logits.stride_model + position * logits.stride_position;
  return {static_cast<const char*>(logits.data) + offset * element_size(logits.dtype),
          logits.dtype};
}

ADAPMIXED_CORE_END
