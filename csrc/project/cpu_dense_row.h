// Small targets at integer orders: both constraints as sums over the whole row in single precision,
// widened to double every few terms. project/float_search.h bounds their error.
#pragma once

#include "common/float_public.h"
#include "common/several.h"
#include "project/cpu_exact_row.h"
#include "project/float_search.h"

ADAPMIXED_CORE_BEGIN

inline Flt folded(const Quad& a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }

// A sum of a few terms at a time in floats, and of these sums in double.
struct BlockSum {
  Vec total{0.0};
  Flt block{0.0f};
  void add(const Quad& a) { block = block + folded(a); }
  void widen() {
    total = total + widened(block);
    block = Flt(0.0f);
  }
  double value() const { return sum(total); }
};

class DenseRow {
 public:
  static constexpr std::int64_t kGroup = 4 * Flt::kLanes;
  static constexpr std::int64_t kBlock = 8 * kGroup;
  static std::int64_t scratch_size(std::int64_t vocab) {  // in doubles
    return round_up(vocab, 64) / 2;
  }

  static bool serves(const FloatPublic& q) {
    return q.least_log_q > kFloatLogQ && q.largest < kFloatLargest;
  }

  DenseRow(const FloatPublic& q, double order, double* scratch)
      : q_(q), order_(order), d_(reinterpret_cast<float*>(scratch)) {}

  // Returns false if floats cannot serve this row.
  template <Dtype D>
  bool load(const Row& row, double lse) {
    if (!(std::fabs(lse - q_.lse) < kFloatDifference)) return false;
    const FloatShift shift = make_shift(lse, q_.lse);
    // d = r' (1 + residual) - 1.
    scale_ = 1.0 + shift.residual;
    offset_ = shift.residual;
    const std::int64_t vocab = q_.vocab;
    BlockSum second, third;
    Flt least(0.0f);
    bool tail = q_.masked_count != 0;  // if q may be 0, set d = 0 there
    const auto step = [&](std::int64_t v, const auto& load) ADAPMIXED_INLINE {
      Quad d, q = Quad::load(q_.q + v);
      const Quad grid = Quad::load(q_.grid + v), rest = Quad::load(q_.rest + v);
      ADAPMIXED_UNROLL
      for (int k = 0; k < 4; ++k) {
        __builtin_prefetch(row.data + (v + 1024 + k * Flt::kLanes) * kElementSize<D>);
        d.v[k] = ratio_excess(load(v + k * Flt::kLanes), grid.v[k], rest.v[k], shift);
        if (tail) d.v[k] = vselect(q.v[k] > Flt(0.0f), d.v[k], Flt(0.0f));
        least = vmin(d.v[k], least);
        d.v[k].store(d_ + v + k * Flt::kLanes);
      }
      const Quad w = (q * d) * d;
      second.add(w);
      third.add(w * d);
    };
    std::int64_t v = 0;
    while (v + kGroup <= vocab) {
      const std::int64_t stop = v + kBlock;
      for (; v < stop && v + kGroup <= vocab; v += kGroup) {
        step(v, [&](std::int64_t at) ADAPMIXED_INLINE { return load_whole<D>(row.data, at); });
      }
      second.widen(), third.widen();
    }
    if (v < vocab) {
      tail = true;
      step(v, [&](std::int64_t at) { return load_floats<D>(row.data, at, vocab); });
      second.widen(), third.widen();
    }
    second_ = second.value();
    third_ = third.value();
    least_ = scale_ * -maximum(Flt(0.0f) - least) + offset_;
    // False also if there are NaN.
    return second_ > 0.0;
  }

  double second_moment() const { return second_; }
  double third_moment() const { return third_; }

  double least_excess() const { return least_; }

  Sums sums(double weight, bool forward, bool reverse) const {
    return forward && reverse ? evaluate<true, true>(weight)
           : forward          ? evaluate<true, false>(weight)
                              : evaluate<false, true>(weight);
  }

 private:
  template <bool kForward, bool kReverse>
  Sums evaluate(double weight) const {
    const Quad slope(weight * scale_), at_zero(weight * offset_), one(1.0), zero(0.0);
    const Quad order(order_);
    const int k = integer_order(order_) - 1;
    BlockSum f, fs, g, gs;
    for (std::int64_t v = 0; v < q_.vocab; v += kGroup) {
      if (v % kBlock == 0) f.widen(), fs.widen(), g.widen(), gs.widen();
      const Quad raw = Quad::load(d_ + v), x = vfma(raw, slope, at_zero);
      const Quad q = Quad::load(q_.q + v), qx = q * x;
      if constexpr (kForward) {
        const Chain<Quad> w = chain(x, k);
        f.add(q * vfma(w.e, x, w.c));
        fs.add(qx * w.e);
      }
      if constexpr (kReverse) {
        const Quad X = x + one, y = zero - x * reciprocal(X);
        const Chain<Quad> w = chain(y, k);
        const Quad c = vfma(w.e, y, w.c);
        g.add(q * (X * c));
        gs.add(qx * vfma(order, y, c));
      }
    }
    f.widen(), fs.widen(), g.widen(), gs.widen();
    return {f.value(), order_ * fs.value() / weight, g.value(),
            (1.0 - order_) * gs.value() / weight};
  }

  const FloatPublic& q_;
  double order_;
  float* d_;
  double scale_ = 1.0, offset_ = 0.0;
  double second_ = 0.0, third_ = 0.0, least_ = 0.0;
};

ADAPMIXED_CORE_END
