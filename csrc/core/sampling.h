// Integer weights and uniform integers below a total.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/chacha.h"
#include "core/config.h"

ADAPMIXED_CORE_BEGIN

using uint128 = unsigned __int128;

// Weights are multiples of 2^-100: a probability keeps at least 47 bits down to 2^-53, and a token
// lifted to weight 1 gains less than 2^-100. With V <= 2^26 and a sum <= 2 totals stay below 2^127.
constexpr int kWeightBits = 100;

// p = 2^-100 and all below it have the weight 1.
constexpr double kUnitProbability = 0x1p-100;

// What no row of probabilities may lack: each in [0, 1] and their sum 1, up to rounding. False for
// a NaN.
template <class T>
ADAPMIXED_HD_INLINE auto is_probability(T p) {
  return (p >= T(0.0)) & (T(1.0 + 1e-6) >= p);
}
ADAPMIXED_HD bool is_total(double sum) { return std::fabs(sum - 1.0) <= 1e-6; }

// floor(p 2^100), at least 1 where the token is in the public support, 0 elsewhere. 0 <= p < 2.
ADAPMIXED_HD uint128 integer_weight(double p, bool supported) {
  if (!supported) return 0;
  if (!(p > kUnitProbability)) return 1;
  int exponent = 0;
  const double mantissa = std::frexp(p, &exponent);  // p = mantissa 2^exponent, in [1/2, 1)
  const auto bits = static_cast<std::uint64_t>(std::ldexp(mantissa, 53));
  const int shift = exponent - 53 + kWeightBits;  // > -53
  return shift >= 0 ? static_cast<uint128>(bits) << shift : bits >> -shift;
}

// Uniform on [0, total), 0 < total < 2^127, by rejection: every draw succeeds with probability >
// 1/3. Numbers have the width of 1.5 total: which ones are drawn does not depend on whether
// rounding brought a total of about 2^100 below or above that.
ADAPMIXED_HD uint128 uniform_below(const Stream& stream, uint128 total) {
  uint128 mask = total - 1 + (total >> 1);
  for (int s = 1; s < 128; s *= 2) mask |= mask >> s;
  std::uint64_t words[8];
  for (std::uint32_t block = 0;; ++block) {
    stream.block(block, words);
    for (int i = 0; i < 8; i += 2) {
      const uint128 draw = (static_cast<uint128>(words[i + 1]) << 64 | words[i]) & mask;
      if (draw < total) return draw;
    }
  }
}

ADAPMIXED_CORE_END
