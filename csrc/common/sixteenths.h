// 2^{t/16} = 2^e 2^{j/16} 2^{f/16} with t = 16 e + j + f, |f| <= 1/2: a table of 16 and a
// polynomial of degree 5, within 9e-15 of the truth, relative. For the sums of a log-sum-exp.
//
// Why double. What is made of a projection needs p/q far better than floats have it: the losses'
// bound (leave_one_out/bound.h) leaves an absolute error of 5e-11 of p/q, weights at the smallest
// targets 1e-12 (project/formula.h). A float e^z, rounded once, is off by up to 2^-24, possibly all
// the terms of a row to the same side: 6e-8, 1200 times what the losses leave. Two floats take a
// dozen operations for one product and its rounding; this takes 10 in double for all, of which
// GPUs for computing do half as many a second as in float.
#pragma once

#include "common/elementary.h"

ADAPMIXED_CORE_BEGIN

constexpr double kSixteenths = 16.0 * kLog2e;  // of an octave in a nat
constexpr int kRoots = 16;

// The bits of a root 2^{j/16}, of which j << 48 is taken: adding (16 e + j) << 48 then multiplies
// with 2^e.
ADAPMIXED_HD std::uint64_t root_bits(double root, int j) {
  std::uint64_t bits;
  std::memcpy(&bits, &root, sizeof bits);
  return bits - (static_cast<std::uint64_t>(j) << 48);
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
