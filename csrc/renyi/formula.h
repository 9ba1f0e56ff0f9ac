// Renyi divergences of two rows: the terms of one token, and the divergence from the sums of terms.
//
// Templates over T: double, or a SIMD vector of doubles (common/simd.h).
#pragma once

#include <cmath>

#include "common/config.h"
#include "common/elementary.h"

ADAPMIXED_CORE_BEGIN

// If the largest log_term exceeds this, the sum of q r^alpha is taken relative to its largest term,
// in the log domain.
constexpr double kLogDomainFrom = 30.0;

// D_alpha = log(1 + excess) / (alpha - 1), or the same from log_sum = log(1 + excess).
ADAPMIXED_HD double divergence_of_excess(double excess, double order) {
  if (std::isnan(excess)) return HUGE_VAL;
  return std::log1p(std::fmax(excess, 0.0)) / (order - 1.0);
}
ADAPMIXED_HD double divergence_of_log(double log_sum, double order) {
  return std::fmax(log_sum, 0.0) / (order - 1.0);
}

// log p, log q and t = log p/q of one token. A token that q lacks is (-inf, -inf, 0), which adds
// nothing. log p is kept because log q + t cancels if q is far below the range of double.
template <class T>
struct TokenPair {
  T log_p, log_q, t;
};

template <class T>
ADAPMIXED_HD_INLINE TokenPair<T> token_pair(T zp, T zq, double p_lse, double q_lse) {
  const T none(-HUGE_VAL);
  const auto has_p = zp > none, has_q = zq > none;
  // All three are rounded alike, however large the log-sum-exps are.
  const T log_p = zp - T(p_lse), log_q = zq - T(q_lse);
  return {vselect(has_q, log_p, none), vselect(has_q, log_q, none),
          vselect(has_p & has_q, log_p - log_q, vselect(has_q, none, T(0.0)))};
}

// Whether the row of `a` has the token and that of `b` lacks it.
template <class T>
ADAPMIXED_HD_INLINE auto only_first(T a, T b) {
  return (a > T(-HUGE_VAL)) & (b == T(-HUGE_VAL));
}

// log q (p/q)^s.
template <class T>
ADAPMIXED_HD_INLINE T log_term(const TokenPair<T>& x, double s) {
  return vfma(T(s), x.t, x.log_q);
}

// q ((p/q)^s - 1 - s (p/q - 1)), s > 1 or s < 0, if log_term is at most kLogDomainFrom.
template <class T>
ADAPMIXED_HD_INLINE T excess_term(const TokenPair<T>& x, double s) {
  const T q = exp_(x.log_q), p = exp_(x.log_p);
  const Ratio<T> r = ratio(x.t);
  const Power<T> w = power(r.d, log_parts(r.d, r.r), T(s));
  // Far from p = q the powers of r alone could overflow. It is base (e^{power t} - 1) - power
  // (p - q); for s near 1 or 0 both parts are small.
  const double power_of_base = s > 0.0 ? s - 1.0 : s;
  const T base = s > 0.0 ? p : q, raised = T(power_of_base) * x.t;
  const T grown =
      vselect(vabs(raised) < T(1.0), base * ratio(raised).d, exp_(log_term(x, s)) - base);
  const T apart = grown - T(power_of_base) * (p - q);
  // Near p = q nothing overflows, unless the order is large; then little cancels.
  return vselect((vabs(x.t) < T(0.2)) & (vabs(raised) < T(1.0)), q * w.excess, apart);
}

// KL(P || Q) = sum p h(-t), KL(Q || P) = sum q h(t), h(u) = e^u - 1 - u >= 0 term by term.
template <class T>
ADAPMIXED_HD_INLINE T entropy_term(const TokenPair<T>& x, bool forward) {
  const T q = exp_(x.log_q), p = exp_(x.log_p), u = T(forward ? -1.0 : 1.0) * x.t;
  const T base = forward ? p : q;
  const T other = forward ? q : p;
  const ExpParts<T> e = exp_parts(u);
  const T near = base * e.tail;
  const T apart = other - base - base * u;
  const T term = vselect(e.n == T(0.0), near, apart);
  // If base = 0, the term is `other` alone, also for infinite u.
  return vselect(base > T(0.0), term, other);
}

// sign * t of a token that q has, else -inf.
template <class T>
ADAPMIXED_HD_INLINE T signed_log_ratio(const TokenPair<T>& x, double sign) {
  return vselect(x.log_q > T(-HUGE_VAL), T(sign) * x.t, T(-HUGE_VAL));
}

// The divergence from a sum of excess_term or entropy_term. `outside` is P of the tokens that q
// lacks, so that sum q (p/q - 1) = -outside.
ADAPMIXED_HD double divergence_of_terms(double total, double outside, double s, double order) {
  return divergence_of_excess(total - s * outside, order);
}
ADAPMIXED_HD double entropy_of_terms(double total, double outside) {
  return std::fmax(total + outside, 0.0);
}

ADAPMIXED_CORE_END
