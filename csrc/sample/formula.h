// Tokens drawn exactly in proportion to the float64 probabilities of a row.
//
// Let x_v be p_v in units of 2^-100. A number U uniform on [0, 2^w), with w large enough, is drawn
// until it lies below sum x. The token is the first v with U < x_0 + ... + x_v. U consists of an
// integer, the draw, and a fraction of 974 bits; together they resolve 2^-1074, the unit of all
// doubles. Integers alone nearly always tell where U lies: the sum of floor(x) over v tokens is
// less than v units below the sum of x. If they do not, once in 2^100 / V^2, the fraction decides.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/config.h"
#include "sample/chacha.h"

ADAPMIXED_CORE_BEGIN

using uint128 = unsigned __int128;

enum SampleStatus : std::int32_t {
  kSampled = 0,
  kNoDistribution = 1,  // a number is not a probability, the sum is not 1, or a bad public row
  kNoSupport = 2,       // no token with q > 0
  kNoMass = 3,          // hardly any probability where q > 0
};

// With V <= 2^26 and a sum <= 2, totals stay below 2^127.
constexpr int kWeightBits = 100;

// The conditions on a row of probabilities, up to rounding: each is in [0, 1], and their sum is 1.
// False for NaN.
template <class T>
ADAPMIXED_HD_INLINE auto is_probability(T p) {
  return (p >= T(0.0)) & (T(1.0 + 1e-6) >= p);
}
ADAPMIXED_HD bool is_total(double sum) { return std::fabs(sum - 1.0) <= 1e-6; }

// With a smaller total weight too few bits are left to tell the tokens of a row apart: hardly any
// probability lies where q > 0.
ADAPMIXED_HD uint128 least_total(std::int64_t vocab) { return static_cast<uint128>(vocab) << 1; }

// p 2^k = bits 2^shift for 0 <= p < 2. If k bits do not hold all of p, this is the integer part.
struct FixedPoint {
  std::uint64_t bits;
  int shift;

  ADAPMIXED_HD FixedPoint(double p, int k) : bits(0), shift(0) {
    if (!(p > 0.0)) return;
    bits = bit_cast<std::uint64_t>(p);
    const int exponent = static_cast<int>(bits >> 52);  // 0: below 2^-1022
    constexpr std::uint64_t kOne = std::uint64_t(1) << 52;
    bits = (bits & (kOne - 1)) | (exponent > 0 ? kOne : 0);
    shift = (exponent > 0 ? exponent : 1) - 1075 + k;
    if (shift < 0) bits = shift > -64 ? bits >> -shift : 0, shift = 0;
  }
};

// floor(p 2^100). 0 <= p < 2.
ADAPMIXED_HD uint128 integer_weight(double p) {
  const FixedPoint x(p, kWeightBits);
  return static_cast<uint128>(x.bits) << x.shift;
}

// Draws integers uniform on [0, 2^w), each of which is below a total with this integer part with
// probability > 1/3. w is the width of 1.5 total, so that the draws do not depend on whether
// rounding brought a total of about 2^100 below or above that.
class Draws {
 public:
  ADAPMIXED_HD explicit Draws(uint128 total) : mask_(total - 1 + (total >> 1)) {
    for (int s = 1; s < 128; s *= 2) mask_ |= mask_ >> s;
  }
  // Draw `number` of the stream; a block holds four.
  ADAPMIXED_HD uint128 operator()(const Stream& stream, std::uint32_t number) const {
    std::uint64_t words[8];
    stream.block(number / 4, words);
    return (*this)(words, number);
  }
  // The same, given the words of the block.
  ADAPMIXED_HD uint128 operator()(const std::uint64_t* words, std::uint32_t number) const {
    uint128 draw = 0;
    for (std::uint32_t i = 0; i < 4; ++i) {  // every index is known at compile time
      if (i == number % 4) draw = static_cast<uint128>(words[2 * i + 1]) << 64 | words[2 * i];
    }
    return draw & mask_;
  }

 private:
  uint128 mask_;
};

// A draw with its fraction, in units of 2^-1074.
class ExactDraw {
 public:
  static constexpr int kLimbs = 18;

  // limbs: memory for kLimbs words.
  ADAPMIXED_HD ExactDraw(uint128 draw, const Stream& stream, std::uint32_t number,
                         std::uint64_t* limbs)
      : limb_(limbs) {
    // The fraction comes from blocks that no draw uses.
    for (std::uint32_t k = 0; k < 2; ++k) stream.block((1u << 31) + 2 * number + k, limb_ + 8 * k);
    constexpr int kWhole = kFractionBits / 64, kRest = kFractionBits % 64;
    limb_[kWhole] &= (std::uint64_t(1) << kRest) - 1;
    limb_[kWhole] |= static_cast<std::uint64_t>(draw << kRest);
    limb_[kWhole + 1] = static_cast<std::uint64_t>(draw >> (64 - kRest));
    limb_[kWhole + 2] = static_cast<std::uint64_t>(draw >> 64 >> (64 - kRest));
  }

  // Returns whether the draw lies within p. If not, subtracts p from it; if so, the draw is used
  // up.
  ADAPMIXED_HD bool lies_within(double p) {
    const FixedPoint x(p, kUnitBits);
    const int at = x.shift / 64;
    const uint128 taken = static_cast<uint128>(x.bits) << x.shift % 64;
    bool borrow = false;
    for (int k = at; k < kLimbs; ++k) {
      const std::uint64_t less = k == at       ? static_cast<std::uint64_t>(taken)
                                 : k == at + 1 ? static_cast<std::uint64_t>(taken >> 64)
                                               : 0;
      const std::uint64_t left = limb_[k] - less - borrow;
      borrow = limb_[k] < less || (borrow && limb_[k] == less);
      limb_[k] = left;
      if (!borrow && k > at) return false;
    }
    return borrow;
  }

 private:
  static constexpr int kUnitBits = 1074, kFractionBits = kUnitBits - kWeightBits;
  static_assert(kFractionBits / 64 == 15 && kFractionBits % 64 > 0 &&
                    kFractionBits + 128 <= 64 * kLimbs,
                "the limbs hold the words of two blocks, the last in part, and a draw above them");
  std::uint64_t* limb_;
};

// The token of a draw that the integers leave undecided, or -1 if the draw lies beyond all tokens.
// `probability(v)` gives p_v.
template <class Probability>
ADAPMIXED_HD std::int64_t exact_token(ExactDraw left, std::int64_t vocab,
                                      const Probability& probability) {
  for (std::int64_t v = 0; v < vocab; ++v) {
    if (left.lies_within(probability(v))) return v;
  }
  return -1;
}

// The token, from `begin` on, that holds a draw which exceeds the weights before `begin` by `left`.
// Returns -1 if the draw exceeds the weights before that token by too little to decide.
template <class Probability>
ADAPMIXED_HD std::int64_t token_by_weights(uint128 left, std::int64_t begin,
                                           const Probability& probability) {
  for (std::int64_t v = begin;; ++v) {
    const uint128 weight = integer_weight(probability(v));
    if (left < weight) return left >= static_cast<uint128>(v) ? v : -1;
    left -= weight;
  }
}

// The probability with which a token is drawn: it is above 0 wherever q > 0.
ADAPMIXED_HD double drawn_probability(double p, bool supported) {
  return supported ? (p > 0.0 ? p : 0x1p-1074) : 0.0;
}

ADAPMIXED_CORE_END
