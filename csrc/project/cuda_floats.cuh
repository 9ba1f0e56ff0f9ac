// Small targets at integer orders: rows are solved from sums over all tokens in floats
// (project/float_search.h). Each evaluation computes p/q and q anew: reading stored values would
// cost as much L2 bandwidth as computing them costs arithmetic.
#pragma once

#include "common/row_pair.cuh"
#include "common/row_parts.cuh"
#include "project/float_search.h"

ADAPMIXED_CORE_BEGIN

// A thread takes so many tokens at a time, each next to those of its neighbours. Their terms are
// added in floats, and these sums in double.
constexpr int kTogether = 8;

// One number of each of these tokens, for chain(): they share its loop over the bits of an order.
struct Together {
  float v[kTogether];

  Together() = default;
  __device__ explicit Together(double x) {
    for (int k = 0; k < kTogether; ++k) v[k] = static_cast<float>(x);
  }
  __device__ friend Together operator+(Together a, const Together& b) {
    for (int k = 0; k < kTogether; ++k) a.v[k] += b.v[k];
    return a;
  }
  __device__ friend Together vfma(const Together& a, const Together& b, Together c) {
    for (int k = 0; k < kTogether; ++k) c.v[k] = vfma(a.v[k], b.v[k], c.v[k]);
    return c;
  }
};

// 1 / x within 1.01 units, for x from 2^-100 to 2^101. A division has three times the instructions,
// and a branch to a slow path.
__device__ inline float reciprocal(float x) {
#if defined(ADAPMIXED_SIMT)
  return 1.0f / x;
#else
  float near;  // within two units
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return vfma(vfma(-x, near, 1.0f), near, near);
#endif
}

// A whole block must call each member together, and all its threads get the same result.
template <Dtype D>
class FloatRow {
 public:
  enum Found { kServed, kNotServed, kUncovered };

  // For up to 2^30 tokens.
  __device__ FloatRow(const RowPair<D>& pair, double private_lse, double order)
      : pair_(pair),
        vocab_(static_cast<int>(pair.vocab)),
        private_lse_(private_lse),
        order_(order),
        ratio_(make_shift(private_lse, pair.public_lse)),
        probability_(make_shift(pair.public_lse, 0.0)),
        least_logit_(static_cast<float>(pair.public_lse + kFloatLogQ)) {}

  // Computes the moments and the least d. Returns whether floats serve this row.
  __device__ Found load() {
    if (!(std::fabs(private_lse_ - pair_.public_lse) < kFloatDifference &&
          std::fabs(pair_.public_lse) < kFloatSplit + kFloatLogQ)) {
      return kNotServed;
    }
    double sums[2] = {0.0, 0.0};
    float least = 0.0f;
    bool too_rare = false, uncovered = false;
    for_each([&](const float* z, const float* z0, const float* q, const float* d) {
      float second = 0.0f, third = 0.0f;
      bool present = true;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        present = present && z0[k] >= least_logit_;
        least = std::fmin(d[k], least);
        const float w = q[k] * d[k] * d[k];
        second += w;
        third += w * d[k];
      }
      sums[0] += second, sums[1] += third;
      if (present) return;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        uncovered = uncovered || (z0[k] == -HUGE_VALF && z[k] > -HUGE_VALF);
        too_rare = too_rare || (z0[k] > -HUGE_VALF && z0[k] < least_logit_);
      }
    });
    block_sum(sums);
    second_ = sums[0], third_ = sums[1];
    least_ = (1.0 + ratio_.residual) * -block_max(-least) + ratio_.residual;
    if (__syncthreads_or(uncovered)) return kUncovered;
    return __syncthreads_or(too_rare) || !(second_ > 0.0) ? kNotServed : kServed;
  }

  __device__ double second_moment() const { return second_; }
  __device__ double third_moment() const { return third_; }
  __device__ double least_excess() const { return least_; }

  __device__ Sums sums(double weight, bool forward, bool reverse) const {
    return forward && reverse ? evaluate<true, true>(weight)
           : forward          ? evaluate<true, false>(weight)
                              : evaluate<false, true>(weight);
  }

 private:
  template <bool kForward, bool kReverse>
  __device__ Sums evaluate(double weight) const {
    const float slope = static_cast<float>(weight * (1.0 + ratio_.residual));
    const float at_zero = static_cast<float>(weight * ratio_.residual);
    const float order = static_cast<float>(order_);
    const int power = integer_order(order_) - 1;
    double sums[4] = {0.0, 0.0, 0.0, 0.0};
    for_each([&](const float*, const float*, const float* q, const float* d) {
      Together x, y;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) x.v[k] = vfma(d[k], slope, at_zero);
      if constexpr (kForward) {
        const Chain<Together> w = chain(x, power);
        float a = 0.0f, a_slope = 0.0f;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          a += q[k] * vfma(w.e.v[k], x.v[k], w.c.v[k]);
          a_slope += q[k] * x.v[k] * w.e.v[k];
        }
        sums[0] += a, sums[1] += a_slope;
      }
      if constexpr (kReverse) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) y.v[k] = -x.v[k] * reciprocal(1.0f + x.v[k]);
        const Chain<Together> w = chain(y, power);
        float b = 0.0f, b_slope = 0.0f;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const float c = vfma(w.e.v[k], y.v[k], w.c.v[k]);
          b += q[k] * ((1.0f + x.v[k]) * c);
          b_slope += q[k] * x.v[k] * vfma(order, y.v[k], c);
        }
        sums[2] += b, sums[3] += b_slope;
      }
    });
    block_sum(sums);
    const double scale = 1.0 + probability_.residual;  // what probability() leaves out of q
    return {scale * sums[0], scale * order_ * sums[1] / weight, scale * sums[2],
            scale * (1.0 - order_) * sums[3] / weight};
  }

  // Calls visit(z, z0, q, d) for this thread's tokens, kTogether at a time. q and d lack their
  // residuals. They are 0 if floats cannot hold the token, and past the end of the row.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    const int first = warp_id() * kWarp * kTogether + lane_id();
    const int stride = static_cast<int>(blockDim.x) * kTogether;
    for (int v = first; v < vocab_; v += stride) {
      float z[kTogether], z0[kTogether], q[kTogether], d[kTogether];
      load_tokens<D>(pair_.private_row + v, vocab_ - v, z);
      load_tokens<D>(pair_.public_row + v, vocab_ - v, z0);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const bool present = z0[k] >= least_logit_;
        const float read = present ? z0[k] : 0.0f;
        const FloatToken a = split_token(read);
        const float excess = ratio_excess(z[k], a.grid, a.rest, ratio_);
        const float mass = probability(read, probability_);
        d[k] = present ? excess : 0.0f;
        q[k] = present ? mass : 0.0f;
      }
      visit(z, z0, q, d);
    }
  }

  const RowPair<D>& pair_;
  int vocab_;
  double private_lse_, order_;
  FloatShift ratio_, probability_;
  float least_logit_;
  double second_ = 0.0, third_ = 0.0, least_ = 0.0;
};

ADAPMIXED_CORE_END
