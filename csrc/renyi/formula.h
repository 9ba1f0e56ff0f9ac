// Renyi divergences of two rows from sums in single precision, as upper bounds.
//
// With t = log p/q, r = e^t, d = r - 1, eta = alpha - 1 and h(u) = e^u - 1 - u,
//   e^{eta D_alpha(P || Q)} - 1 = eta sum q (r t - d) + sum p h(eta t),
//   e^{eta D_alpha(Q || P)} - 1 = eta sum q (d - t) + sum q h(-eta t),
// where the first sum is a relative entropy. No term is negative, so the sums are off by a small
// part of themselves, however near P and Q are and at any order. (The excesses of project lose
// 1 / eta units, and 1 + d loses the digits of a small r.)
//
// Errors, in units (kFloatUnit) of a term; those found by trying are of every float u or t, or of
// close steps. Floats serve tokens with log p, log q >= -kFloatLog; others are computed in double.
//   t: 2, for two roundings; u = eta t: 4. A relative error of u moves h by 2 + max(u, 0) of it; of
//   t, an entropy's term by as much.
//   q: 4 (3.3 found). p = q r: 2 |t| + 3 more (1.4 found for r), so 127.
//   r t - d and d - t, given t: 12 (11.8 found). With t, q and a product, 12 + 2 (2 + 60) + 5.
//   h, given u: 12 (11.5 found). Up to kFloatLog, with u, p and a product, 12 + 4 (2 + 60) + 128.
//   Beyond, e^{log p + u} stands for p h, which is less by less than a unit. log p is off by 2 of
//   itself, u by 4, their sum by 1 and the exponential by 2 (1.4 found). The term is at most the
//   sum S, so u <= 60 + log S: 120 + 4 (60 + log S) + log S + 3.
//   Additions in floats: 16.
// Nothing of it exceeds kUnits + 5 log(1 + S). What both log-sum-exps and the rounding of their
// difference move all t by in common, delta, moves S by e^{eta delta} - 1 of itself and less than
// eta (1 + eta) delta^2.
#pragma once

#include "common/elementary.h"
#include "common/float_power.h"
#include "project/terms.h"

ADAPMIXED_CORE_BEGIN

constexpr double kUnits = 405.0;
constexpr float kFloatLog = 60.0f;
// Added to divergences other than 0, for terms below the range of floats or in double.
constexpr double kDivergenceAbsolute = 1e-12;

// What a pair's log-sum-exps tell of it. Pairs of floats add up to a double.
struct PairShift {
  double p_lse, q_lse, error;  // error: delta
  float p_high, p_low, q_high, q_low, high, low;
  float q_centre, q_factor;
  FloatShift q_shift;

  ADAPMIXED_HD PairShift(double p, double q) : p_lse(p), q_lse(q) {
    const double centre = centre_of(q), c = p - q;
    split(p, p_high, p_low), split(q, q_high, q_low), split(c, high, low);
    error = double_ratio_error(p, q) + 0x1p-47 * std::fabs(c);
    q_centre = static_cast<float>(centre);
    q_shift = make_shift(q - centre, 0.0);
    q_factor = static_cast<float>(1.0 + q_shift.residual);
  }
  ADAPMIXED_HD static void split(double x, float& x_high, float& x_low) {
    x_high = static_cast<float>(x), x_low = static_cast<float>(x - x_high);
  }
};

// h(u) from e^u.
template <class F>
ADAPMIXED_HD_INLINE F exp_excess(const FloatExp<F>& e, F u) {
  const F direct = vfma(e.scale, e.f + e.tail, e.scale - F(1.0f)) - u;
  return vselect(vabs(e.octaves) > F(0.5f), direct, e.tail);
}

// r t - d and d - t.
template <class F>
struct EntropyTerms {
  F r, forward, backward;
};
template <class F>
ADAPMIXED_HD_INLINE EntropyTerms<F> entropy_terms(F t) {
  const FloatExp<F> e = float_exp_parts(t);
  const F d = vfma(e.scale, e.f + e.tail, e.scale - F(1.0f));
  const F r = vfma(e.scale, e.f + e.tail, e.scale);
  const auto far = vabs(e.octaves) > F(0.5f);
  return {r, vselect(far, vfms(r, t, d), vfms(t, d, e.tail)), exp_excess(e, t)};
}

// The sums of a pair for a few orders.
template <class F, int kOrders>
class PairSums {
 public:
  static constexpr int kSize = 3 + 2 * kOrders;

  // Takes `orders` from `first` on; the last of `count` stands for those beyond it.
  ADAPMIXED_HD PairSums(const PairShift& x, const double* orders, int first, int count) : x_(x) {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kOrders; ++k) {
      eta_[k] = orders[first + k < count ? first + k : count - 1] - 1.0;
    }
  }

  // Adds tokens, unless one of them needs double: then returns false.
  ADAPMIXED_HD_INLINE bool add(F z, F z0) {
    // z - z0 with what its rounding lost.
    const F gap = z - z0, part = gap - z, lost = (z - (gap - part)) - (z0 + part);
    const F t = (gap - F(x_.high)) + (lost - F(x_.low));
    const F log_p = (z - F(x_.p_high)) - F(x_.p_low), log_q = (z0 - F(x_.q_high)) - F(x_.q_low);
    if (any(F(-kFloatLog) > vmin(log_p, log_q))) return false;
    const F q = probability(z0 - F(x_.q_centre), x_.q_shift) * F(x_.q_factor);
    const EntropyTerms<F> terms = entropy_terms(t);
    sums_[0].add(vabs(t), F(1.0f));
    sums_[1].add(q, terms.forward);
    sums_[2].add(q, terms.backward);
    const F p = q * terms.r;
    ADAPMIXED_UNROLL
    for (int k = 0; k < kOrders; ++k) {
      const F u = F(static_cast<float>(eta_[k])) * t;
      add_power(3 + 2 * k, p, log_p, u);
      add_power(4 + 2 * k, q, log_q, F(0.0f) - u);
    }
    return true;
  }

  // Adds tokens in double; T has the type of the sums.
  template <class T>
  ADAPMIXED_HD void add_exactly(T z, T z0) {
    const T masked(10.0 * kMaskedLog), zero(0.0), one(1.0);
    T log_p = z - T(x_.p_lse), log_q = z0 - T(x_.q_lse);
    const auto has_p = log_p > T(kMaskedLog), has_q = log_q > T(kMaskedLog);
    log_p = vselect(has_p, log_p, masked), log_q = vselect(has_q, log_q, masked);
    const T p = exp_(log_p), q = exp_(log_q), t = log_p - log_q, infinite(HUGE_VAL);
    const T p_alone = vselect(has_q, zero, vselect(has_p, infinite, zero));
    const T q_alone = vselect(has_p, zero, vselect(has_q, infinite, zero));
    add_to(0, vabs(t));
    add_to(1, p * t - (p - q) + p_alone);
    add_to(2, p - q * (one + t) + q_alone);
    ADAPMIXED_UNROLL
    for (int k = 0; k < kOrders; ++k) {
      const T u = T(eta_[k]) * t;
      add_to(3 + 2 * k, power_exactly(p, log_p, u));
      add_to(4 + 2 * k, power_exactly(q, log_q, zero - u));
    }
  }

  ADAPMIXED_HD_INLINE void widen() {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kSize; ++k) sums_[k].widen();
  }
  ADAPMIXED_HD void get(double (&sums)[kSize]) const {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kSize; ++k) sums[k] = sum(sums_[k].total);
  }

 private:
  // Adds the terms of an order and a direction, in which the tokens have this mass.
  ADAPMIXED_HD_INLINE void add_power(int k, F mass, F log_mass, F u) {
    const auto large = u > F(kFloatLog);
    const bool some = any(large);
    const FloatExp<F> e = float_exp_parts(some ? vselect(large, log_mass + u, u) : u);
    F term = mass * exp_excess(e, u);
    if (some) {
      const F part = vselect(large, F(1.0f) + (e.f + e.tail), F(0.0f));
      sums_[k].total = sums_[k].total + widened(part, e.octaves);
      term = vselect(large, F(0.0f), term);
    }
    sums_[k].add(term, F(1.0f));
  }
  template <class T>
  static ADAPMIXED_HD T power_exactly(T mass, T log_mass, T u) {
    const ExpParts<T> e = exp_parts(u);
    const T direct = exp_(log_mass + u) - mass * (T(1.0) + u);
    return vselect(e.n == T(0.0), mass * e.tail, direct);  // small ones count near order 1
  }
  template <class T>
  ADAPMIXED_HD_INLINE void add_to(int k, T term) {
    sums_[k].total = sums_[k].total + term;
  }

  const PairShift& x_;
  double eta_[kOrders];
  // Of |t|, which is 0 for equal rows alone; of the entropies' terms; and of an order's.
  BlockSum<F> sums_[kSize];
};

// An upper bound on a divergence from its entropy, and from the sums of an order's terms and |t|.
ADAPMIXED_HD double divergence_above(double entropy, double raised, double moved, double order,
                                     const PairShift& x) {
  if (moved == 0.0) return 0.0;
  const double eta = order - 1.0, shift = eta * x.error;
  const double excess = eta * entropy + raised;
  if (!(excess < HUGE_VAL)) return HUGE_VAL;  // NaN, too: rows without a log-sum-exp
  const double error = (kUnits + 5.0 * std::log1p(std::fabs(excess))) * kFloatUnit + 1.01 * shift;
  const double above = (1.0 + error) * std::fmax(excess, 0.0) + shift * (shift + x.error);
  return std::log1p(above) / eta + kDivergenceAbsolute;
}

ADAPMIXED_CORE_END
