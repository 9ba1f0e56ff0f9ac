// A private row on the CPU: d of its tokens, kept, and q or log2(q / T).
#pragma once

#include "common/several.h"
#include "project/cpu_public.h"
#include "project/terms.h"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
class PrivateRow {
 public:
  using Float = Flt;

  // scratch: as many doubles as tokens, rounded up to 64.
  PrivateRow(const PublicRow& q, const Row& row, double lse, const ProjectTarget& target,
             double* scratch)
      : q_(q),
        target_(target),
        row_(row),
        d_(reinterpret_cast<float*>(scratch)),
        kept_mass_(d_ + round_up(q.vocab, 64)),
        mass_(q.mass) {
    const double centre = centre_of(lse);
    const FloatShift shift = make_shift(lse - centre, q.lse - q.centre);
    scale_ = 1.0 + shift.residual, offset_ = shift.residual;
    c_ = Flt(shift.c), centre_ = Flt(static_cast<float>(centre));
  }

  double scale() const { return scale_; }
  double offset() const { return offset_; }
  RowRange range() const {
    return {scale_ * -maximum(Flt(0.0f) - low_) + offset_, scale_ * maximum(high_) + offset_,
            target_.log_target - q_.least_log_q};
  }

  template <class Visit>
  ADAPMIXED_INLINE void for_each(const Visit& visit) const {
    for (std::int64_t v = 0; v < count_; v += Flt::kLanes) {
      visit(Flt::load(mass_ + v), Flt::load(d_ + v));
    }
  }
  void add_up(double (&)[6]) const {}

  Moments load() {
    BlockSum<Flt> second, third, fourth;
    const auto step = [&](std::int64_t v, Flt z) ADAPMIXED_INLINE {
      const Flt q = Flt::load(q_.mass + v);
      const Flt d = vselect(q > Flt(0.0f), ratio(v, z), Flt(0.0f));
      keep(v, d);
      const Flt e = q * d * d;
      second.add(e), third.add(e * d), fourth.add(e * d * d);
    };
    constexpr std::int64_t kBlock = kTermsInFloats * Flt::kLanes;
    std::int64_t v = 0;
    for (; v + kBlock <= q_.vocab; second.widen(), third.widen(), fourth.widen()) {
      for (const std::int64_t stop = v + kBlock; v < stop; v += Flt::kLanes) {
        __builtin_prefetch(row_.data + (v + 1024) * kElementSize<D>);
        step(v, load_whole<D>(row_.data, v));
      }
    }
    for (; v < q_.vocab; v += Flt::kLanes) step(v, load_floats<D>(row_.data, v, q_.vocab));
    second.widen(), third.widen(), fourth.widen();
    count_ = v;
    return {sum(second.total), sum(third.total), sum(fourth.total)};
  }

  // Keeps vectors with a token that can matter: for s = alpha, X^s <= max(1, r^s); for
  // s = 1 - alpha, X >= r if r <= 1, and X >= 1 - most. Smaller terms than kLeftOut / V are left
  // out.
  void select(double s, double most) {
    const double per_nat = kOctavesPerNat;
    // Half a nat is left for the rounding of the scores.
    const double least = target_.log_target + std::log(kLeftOut / q_.vocab) - 0.5;
    const Flt threshold(static_cast<float>((least + q_.lse - q_.centre) * per_nat));
    const double floor = s < 0.0 && most < 1.0 ? std::log1p(-most) * per_nat : -1e30;
    const Flt power(static_cast<float>(s)), lowest(static_cast<float>(floor)), c = c_;
    mass_ = kept_mass_;
    count_ = 0;
    low_ = high_ = Flt(0.0f);
    const auto matters = [&](std::int64_t v, Flt z) ADAPMIXED_INLINE {
      const Flt a = Flt::load(q_.grid + v);
      const Flt t = vmax(vfms(z - centre_, Flt(kOctavesPerNat), a + c), lowest);
      return vfma(t, power, a) > threshold;
    };
    const auto take = [&](std::int64_t v, Flt z, FltMask matters) {
      if (matters.bits() == 0) return;
      const Flt share = Flt::load(q_.mass + v);
      share.store(kept_mass_ + count_);
      keep(count_, vselect(share > Flt(kNoShare), ratio(v, z), Flt(0.0f)));
      count_ += Flt::kLanes;
    };
    std::int64_t v = 0;
    for (; v + Quad::kLanes <= q_.vocab; v += Quad::kLanes) {
      Flt z[Quad::kSize];
      FltMask hit[Quad::kSize];
      ADAPMIXED_UNROLL
      for (int k = 0; k < Quad::kSize; ++k) {
        z[k] = load_whole<D>(row_.data, v + k * Flt::kLanes);
        hit[k] = matters(v + k * Flt::kLanes, z[k]);
      }
      if (((hit[0] | hit[1]) | (hit[2] | hit[3])).bits() == 0) continue;
      for (int k = 0; k < Quad::kSize; ++k) take(v + k * Flt::kLanes, z[k], hit[k]);
    }
    for (; v < q_.vocab; v += Flt::kLanes) {
      const Flt z = load_floats<D>(row_.data, v, q_.vocab);
      take(v, z, matters(v, z));
    }
  }

 private:
  // d' of the tokens from v on, with p/q kept above e^-25.
  ADAPMIXED_INLINE Flt ratio(std::int64_t v, Flt z) const {
    const Flt a = Flt::load(q_.grid + v) + c_;
    z = vmax(vfma(a, Flt(1.0f / kOctavesPerNat), Flt(-25.0f)), z - centre_);
    return ratio_excess(z, a, Flt::load(q_.rest + v));
  }

  void keep(std::int64_t at, Flt d) {
    low_ = vmin(low_, d), high_ = vmax(high_, d);
    d.store(d_ + at);
  }

  const PublicRow& q_;
  const ProjectTarget& target_;
  const Row row_;
  float *d_, *kept_mass_;
  const float* mass_;
  std::int64_t count_ = 0;  // of tokens, in whole vectors
  Flt c_, centre_, low_{0.0f}, high_{0.0f};
  double scale_, offset_;
};

ADAPMIXED_CORE_END
