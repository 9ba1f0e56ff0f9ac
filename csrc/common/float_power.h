// (1 + x)^s - 1 - s x in single precision, for any order.
//
// Templates over F: a vector of floats, or some tokens of a GPU's thread.
#pragma once

#include "common/float_ratio.h"

ADAPMIXED_CORE_BEGIN

// log X, and log X - x for X near 1. Within 2 units of log X.
template <class F>
struct FloatLog {
  F log, excess, octaves;
};
template <class F>
ADAPMIXED_HD_INLINE FloatLog<F> float_log(F x, F X) {
  F e, m;
  vsplit(X, e, m);
  const F w = vselect(vabs(e) > F(0.5f), m - F(1.0f), x);
  const F z = w * w;
  F p(7.0376836292e-2f);
  p = vfma(p, w, F(-1.1514610310e-1f));
  p = vfma(p, w, F(1.1676998740e-1f));
  p = vfma(p, w, F(-1.2420140846e-1f));
  p = vfma(p, w, F(1.4249322787e-1f));
  p = vfma(p, w, F(-1.6668057665e-1f));
  p = vfma(p, w, F(2.0000714765e-1f));
  p = vfma(p, w, F(-2.4999993993e-1f));
  p = vfma(p, w, F(3.3333331174e-1f));
  const F excess = vfma(w * z, p, z * F(-0.5f));
  const F rest = vfma(e, F(-2.12194440e-4f), excess);
  return {vfma(e, F(0.693359375f), w + rest), excess, e};
}

// e^u = scale (1 + f + tail), tail = e^f - 1 - f. u is at least -87; above the range, NaN or inf.
template <class F>
struct FloatExp {
  F scale, f, tail, octaves;
};
template <class F>
ADAPMIXED_HD_INLINE FloatExp<F> float_exp_parts(F u) {
  u = vmax(u, F(-87.0f));
  const F shifted = vfma(u, F(1.44269504f), F(kFloatShifter));
  const F n = shifted - F(kFloatShifter);
  const F f = vfma(n, F(2.12194440e-4f), vfma(n, F(-0.693359375f), u));
  F p(1.9875691500e-4f);
  p = vfma(p, f, F(1.3981999507e-3f));
  p = vfma(p, f, F(8.3334519073e-3f));
  p = vfma(p, f, F(4.1665795894e-2f));
  p = vfma(p, f, F(1.6666665459e-1f));
  p = vfma(p, f, F(5.0000001201e-1f));
  return {exp2_integer(shifted), f, f * f * p, n};
}

// The excess, which is positive if s is no order between 0 and 1. It is off by at most
// 90 + 30 / |s - 1| + 3 |s log X| units of itself (for s < 0: 30 / |s|), found by trying 2 million
// x at orders from 1.001 to 1 000.
template <class F>
ADAPMIXED_HD_INLINE F power_excess(F x, const FloatLog<F>& log, F s) {
  const FloatExp<F> e = float_exp_parts(s * log.log);
  const F direct = vfma(e.scale, e.f + e.tail, e.scale - F(1.0f)) - s * x;
  // e^u - 1 - u and u - s x: both are small and accurate if u and x are small.
  const F small = vfma(s, log.excess, e.tail);
  return vselect(vmax(vabs(e.octaves), vabs(log.octaves)) > F(0.5f), direct, small);
}

ADAPMIXED_CORE_END
