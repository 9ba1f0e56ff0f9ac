// Small targets at integer orders: rows are solved from sums over all tokens in floats
// (project/float_search.h). Each evaluation computes p/q and q anew: reading stored values would
// cost as much L2 bandwidth as computing them costs arithmetic.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"
#include "common/quad.cuh"
#include "project/float_search.h"

ADAPMIXED_CORE_BEGIN

// A sum of a few terms at a time in floats, and of these sums in double.
class BurstSum {
 public:
  __device__ void add(const FloatQuad& a) { burst_ += sum(a); }
  __device__ void widen() {
    total_ += static_cast<double>(burst_);
    burst_ = 0.0f;
  }
  __device__ double total() const { return total_; }

 private:
  double total_ = 0.0;
  float burst_ = 0.0f;
};

// A whole block must call each member together, and all its threads get the same result.
template <Dtype D>
class FloatRow {
 public:
  using Word = typename Bits<D>::type;
  enum Found { kServed, kNotServed, kUncovered };

  __device__ FloatRow(const Word* private_row, const Word* public_row, int vocab,
                      double private_lse, double public_lse, double order)
      : private_row_(private_row),
        public_row_(public_row),
        vocab_(vocab),
        private_lse_(private_lse),
        public_lse_(public_lse),
        order_(order),
        ratio_(make_shift(private_lse, public_lse)),
        probability_(make_shift(public_lse, 0.0)),
        least_logit_(static_cast<float>(public_lse + kFloatLogQ)) {}

  // Computes the moments and the least d. Returns whether floats serve this row.
  __device__ Found load() {
    if (!(std::fabs(private_lse_ - public_lse_) < kFloatDifference &&
          std::fabs(public_lse_) < kFloatSplit + kFloatLogQ)) {
      return kNotServed;
    }
    BurstSum second, third;
    float least = 0.0f;
    bool too_rare = false, uncovered = false;
    for_each(
        [&](const float* z, const float* z0, const FloatQuad& q, const FloatQuad& d) {
#pragma unroll
          for (int k = 0; k < kPack; ++k) {
            least = vmin(d.v[k], least);
            if (z0[k] >= least_logit_) continue;
            uncovered = uncovered || (z0[k] == -HUGE_VALF && z[k] > -HUGE_VALF);
            too_rare = too_rare || z0[k] > -HUGE_VALF;
          }
          const FloatQuad w = (q * d) * d;
          second.add(w);
          third.add(w * d);
        },
        [&] { second.widen(), third.widen(); });
    double sums[2] = {second.total(), third.total()};
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
    const FloatQuad slope(weight * (1.0 + ratio_.residual)), at_zero(weight * ratio_.residual);
    const FloatQuad one(1.0), order(order_);
    const int k = integer_order(order_) - 1;
    BurstSum f, fs, g, gs;
    for_each(
        [&](const float*, const float*, const FloatQuad& q, const FloatQuad& d) {
          const FloatQuad x = vfma(d, slope, at_zero), qx = q * x;
          if constexpr (kForward) {
            const Chain<FloatQuad> w = chain(x, k);
            f.add(q * vfma(w.e, x, w.c));
            fs.add(qx * w.e);
          }
          if constexpr (kReverse) {
            const FloatQuad X = x + one, y = FloatQuad(0.0) - x * (one / X);
            const Chain<FloatQuad> w = chain(y, k);
            const FloatQuad c = vfma(w.e, y, w.c);
            g.add(q * (X * c));
            gs.add(qx * vfma(order, y, c));
          }
        },
        [&] { f.widen(), fs.widen(), g.widen(), gs.widen(); });
    double sums[4] = {f.total(), fs.total(), g.total(), gs.total()};
    block_sum(sums);
    const double scale = 1.0 + probability_.residual;  // what probability() leaves out of q
    return {scale * sums[0], scale * order_ * sums[1] / weight, scale * sums[2],
            scale * (1.0 - order_) * sums[3] / weight};
  }

  // Calls visit(z, z0, q, d) for this thread's packs of tokens. q and d lack their residuals, and
  // are 0 if floats cannot hold the token. Calls widen() after every eighth pack and the last.
  template <class Visit, class Widen>
  __device__ void for_each(const Visit& visit, const Widen& widen) const {
    constexpr int kBurst = 8;
    const bool aligned = pack_aligned<D>(private_row_),
               public_aligned = pack_aligned<D>(public_row_);
    const int stride = static_cast<int>(blockDim.x) * kPack;
    int v = static_cast<int>(threadIdx.x) * kPack;
    while (v < vocab_) {
      for (int step = 0; step < kBurst && v < vocab_; ++step) {
        const Pack<D> pack = load_pack<D>(private_row_, v, vocab_, aligned);
        const Pack<D> public_pack = load_pack<D>(public_row_, v, vocab_, public_aligned);
        float z[kPack], z0[kPack];
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          z[k] = float_of<D>(pack.bits[k]), z0[k] = float_of<D>(public_pack.bits[k]);
        }
        v += stride;
        FloatQuad q, d;
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          const bool present = z0[k] >= least_logit_;
          const float read = present ? z0[k] : 0.0f;
          const FloatToken a = split_token(read);
          const float excess = ratio_excess(z[k], a.grid, a.rest, ratio_);
          d.v[k] = present ? excess : 0.0f;
          q.v[k] = present ? probability(read, probability_) : 0.0f;
        }
        visit(z, z0, q, d);
      }
      widen();
    }
  }

  const Word *private_row_, *public_row_;
  int vocab_;
  double private_lse_, public_lse_, order_;
  FloatShift ratio_, probability_;
  float least_logit_;
  double second_ = 0.0, third_ = 0.0, least_ = 0.0;
};

ADAPMIXED_CORE_END
