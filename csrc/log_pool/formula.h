// The logarithmic pool of clipped log-ratios,
//   p(v) ~ q(v) exp((kappa/N) sum_i u_i(v)),   u_i(v) = clip(log p_i(v) - log q(v), a, b),
// with p = 0 where q = 0. An absent or inactive member has u_i = 0; N stays the same. The
// normaliser is log sum_v q(v) exp((kappa/N) sum_i u_i(v)). The sums are in cpu.cpp and
// cuda.cu.
//
// Every u_i is rounded to a multiple of 2^-k, where k depends on N, a and b alone, such that sums
// over N slots stay below 2^51 units. Hence all sums of u_i are exact, as integers and as doubles.
// They are the same in any order and for any number of threads. The sum of an ensemble whose slot i
// is empty is exactly this sum minus u_i. A float64 sum of unrounded u_i would take as many
// operations: the addition that rounds to a multiple of 2^-k is part of the fused multiply-add that
// also subtracts the log-sum-exps. But every model's rounding would depend on all others.
//
// For privacy it does not matter to which value u_i is rounded, only that it is a function of row i
// and of public values and lies in [a, b]. The grid's clip bounds are rounded inwards, and the span
// is that of the rounded u_i. Hence the log-sum-exp of row i may be in single precision
// (common/float_rows.h), as long as all computations of the pool use the same one.
//
// What remains is the rounding of log p = x, where
//   e = fl(share S + log q),   x = fl(e - Z),   share = fl(kappa/N),
// S is the exact sum, and Z is one number for the row. With M = max(-a, b) we have
// |e| <= kappa M + |log q| and |Z| <= kappa M. So x is off by at most 2^-53 (|e| + |x|), and
// p = exp(x) by another 2^-51 relative: altogether, at every token with p >= 2^-1022, by
// 2^-51 (1 + kappa M + |log q|). For the ensembles with and without slot i, log p - log p' is
// share u_i + const, plus four such errors between two tokens. Its range is at most
//   (kappa/N) span_i + 2^-49 (1 + kappa M + L),
// where L is the largest |log q| of the tokens compared.
#pragma once

#include <cmath>

#include "common/elementary.h"
#include "common/operators.h"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

// Near this number the doubles are the integers, which lie in their low bits. If |x| <= 2^51,
// adding x gives kGridZero plus x rounded to an integer.
constexpr double kGridZero = 6755399441055744.0;  // 1.5 * 2^52
constexpr int kFinestGrid = 40;

// log p_i - log q as integers on a grid, for one call.
class PoolGrid {
 public:
  ADAPMIXED_HD explicit PoolGrid(const LogPoolOptions& options) {
    const double reach = static_cast<double>(options.num_models) *
                         std::fmax(std::fabs(options.lower), options.upper);
    int exponent = 0;
    if (reach > 0.0) std::frexp(reach, &exponent);  // reach < 2^exponent
    const int k = exponent + kFinestGrid < 51 ? kFinestGrid : 51 - exponent;
    unit_ = std::ldexp(1.0, -k);
    scale_ = std::ldexp(1.0, k);
    least_ = kGridZero + std::ceil(options.lower * scale_);
    most_ = kGridZero + std::floor(options.upper * scale_);
    share_ = options.scale / static_cast<double>(options.num_models);
  }

  // The constant of a row: position(z - z_0, origin) is kGridZero plus its log p/q in units.
  ADAPMIXED_HD double origin(double private_lse, double public_lse) const {
    return kGridZero - (private_lse - public_lse) * scale_;
  }
  // Not yet clipped. Beyond the clip bounds it may be a non-integer or -inf. If the public row
  // masks the token, it may be NaN or +inf. Monotone in the difference of the logits.
  template <class T>
  ADAPMIXED_HD_INLINE T position(T difference, T origin) const {
    return vfma(difference, T(scale_), origin);
  }
  template <class T>
  ADAPMIXED_HD_INLINE T clipped(T position) const {
    return vmin(vmax(position, T(least_)), T(most_));
  }

  // Converts a clipped position, or kGridZero plus a sum of units, to nats.
  template <class T>
  ADAPMIXED_HD_INLINE T nats(T position) const {
    return (position - T(kGridZero)) * T(unit_);
  }
  // Whether both a and b occur among the u_i.
  ADAPMIXED_HD bool clips_both(double low, double high) const {
    return low <= least_ && high >= most_;
  }
  // max u_i - min u_i, exactly, from the extremes of the positions; 0 if there are none.
  ADAPMIXED_HD double span(double low, double high) const {
    return low <= high ? nats(clipped(high)) - nats(clipped(low)) : 0.0;
  }

  // log p + Z at a token, given the sum of u_i in nats.
  template <class T>
  ADAPMIXED_HD_INLINE T log_weight(T sum, T log_q) const {
    return vfma(T(share_), sum, log_q);
  }

 private:
  double unit_, scale_, least_, most_, share_;
};

ADAPMIXED_HD bool takes_part(const LogPoolOptions& options, std::int64_t at) {
  return options.active == nullptr || options.active[at];
}

ADAPMIXED_CORE_END
