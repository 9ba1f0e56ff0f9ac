// Normal variates from 64-bit words (Box-Muller).
//
// Templates over T: double, or a SIMD vector of doubles (common/simd.h). The code uses only
// correctly rounded operations and explicit fused multiply-adds, and no libm. One pair of words
// therefore gives the same two doubles on every instruction set and device.
#pragma once

#include <cstdint>

#include "common/config.h"
#include "common/elementary.h"

ADAPMIXED_CORE_BEGIN

template <class T>
struct SinCos {
  T sin, cos;
};

// Sine and cosine of the angle 2 pi v, for v in [0, 1) a multiple of 2^-53; each within 2 ulp.
template <class T>
ADAPMIXED_HD SinCos<T> sin_cos_turns(T v) {
  const T n = vround(v * T(4.0));
  const T r = vfma(n, T(-0.25), v);  // exact, |r| <= 1/8
  const T z = r * r;
  // Taylor series in turns; the first terms left out are 1e-19 and 3e-18 relative.
  T s = T(0.1042291622081398);
  s = vfma(s, z, T(-0.7181223017785005));
  s = vfma(s, z, T(3.8199525848482821));
  s = vfma(s, z, T(-15.0946425768229904));
  s = vfma(s, z, T(42.0586939448976531));
  s = vfma(s, z, T(-76.7058597530613858));
  s = vfma(s, z, T(81.6052492760750542));
  s = vfma(s, z, T(-41.3417022403997602));
  s = vfma(s, z, T(6.2831853071795865));
  s = s * r;
  T c = T(0.2820059684557912);
  c = vfma(c, z, T(-1.7143907110886721));
  c = vfma(c, z, T(7.9035363713184688));
  c = vfma(c, z, T(-26.4262567833743975));
  c = vfma(c, z, T(60.2446413718766604));
  c = vfma(c, z, T(-85.4568172066937277));
  c = vfma(c, z, T(64.9393940226682915));
  c = vfma(c, z, T(-19.7392088021787172));
  c = vfma(c, z, T(1.0));
  // Adds the quarter turns again; n = 0 and n = 4 are the same.
  const auto first = n == T(1.0), second = n == T(2.0), third = n == T(3.0);
  const auto odd = first | third;
  const T sine = vselect(odd, c, s), cosine = vselect(odd, s, c);
  return {vselect(second | third, T(0.0) - sine, sine),
          vselect(first | second, T(0.0) - cosine, cosine)};
}

// Two standard normals from two integers below 2^53; the tail reaches 8.57 sigma.
template <class T>
struct NormalPair {
  T first, second;
};

template <class T>
ADAPMIXED_HD NormalPair<T> box_muller(T a, T b) {
  const T u = (a + T(1.0)) * T(0x1p-53);  // (0, 1]
  const T radius = vsqrt(T(-2.0) * log_parts(u - T(1.0), u).log);
  const SinCos<T> angle = sin_cos_turns(b * T(0x1p-53));
  return {radius * angle.cos, radius * angle.sin};
}

// The same from two 64-bit words.
ADAPMIXED_HD NormalPair<double> normal_pair(std::uint64_t a, std::uint64_t b) {
  return box_muller(static_cast<double>(a >> 11), static_cast<double>(b >> 11));
}

ADAPMIXED_CORE_END
