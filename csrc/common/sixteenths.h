// 2^{t/16} = 2^e 2^{j/16} 2^{f/16} with t = 16 e + j + f, |f| <= 1/2: a table of 16 roots and a
// polynomial of degree 5. The relative error is within 9e-15. Used for the sums of a log-sum-exp.
//
// Why double: the losses' bound (leave_one_out/formula.h) leaves an absolute error of 5e-11 of p/q.
// A float e^z, rounded once, is off by up to 2^-24, and all terms of a row may be off to the same
// side: 6e-8, which is 1200 times that. A pair of floats takes a dozen operations for one product
// and its rounding. This takes 10 operations in double in all, and data-centre GPUs do half as many
// of these a second as in float.
#pragma once

#include "common/elementary.h"

ADAPMIXED_CORE_BEGIN

constexpr double kSixteenths = 16.0 * kLog2e;  // sixteenths of an octave in a nat
constexpr int kRoots = 16;

// 2^{j/16}.
#if defined(__CUDACC__)
__device__
#endif
    static const double kRootValues[kRoots] = {
        1.0,
        1.0442737824274138403,
        1.0905077326652576592,
        1.1387886347566916537,
        1.1892071150027210667,
        1.2418578120734840486,
        1.2968395546510096659,
        1.3542555469368927283,
        1.4142135623730950488,
        1.4768261459394993114,
        1.5422108254079408236,
        1.6104903319492543082,
        1.6817928305074290861,
        1.7562521603732994831,
        1.8340080864093424635,
        1.9152065613971472939,
};

// The bits of a root 2^{j/16} minus j << 48: adding (16 e + j) << 48 then multiplies by 2^e.
ADAPMIXED_HD std::uint64_t root_bits(double root, int j) {
  return bit_cast<std::uint64_t>(root) - (static_cast<std::uint64_t>(j) << 48);
}

// (2^{f/16} - 1) / f.
template <class T>
ADAPMIXED_HD_INLINE T sixteenth_slope(T f) {
  T p(1.2716049516906704681e-9);
  p = vfma(p, f, T(1.4676387238435006694e-7));
  p = vfma(p, f, T(1.3550807778387664557e-5));
  p = vfma(p, f, T(9.3838479262966458471e-4));
  return vfma(p, f, T(4.3321698784996581839e-2));
}

ADAPMIXED_CORE_END
