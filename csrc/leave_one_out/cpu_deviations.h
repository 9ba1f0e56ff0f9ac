// delta_i = p_bar_i/q - 1 of all models on a stretch of one position's vocabulary. The numbers are
// stored as floats delta_i - base; the base is chosen so that floats can tell the models apart.
#pragma once

#include "common/float_public.h"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

// The arithmetic of deviations. In floats, with base 0: for models that do not share much more than
// they differ by. In double, with one model's delta as base, rounded to a float at the end.
struct Arithmetic {
  bool in_double;
  std::int64_t base_model;  // for double; -1: base 0, against the public distribution
};

// Arrays with one number for each token of the stretch, unless said otherwise.
struct DeviationColumns {
  float *grid, *rest;  // a of the public token: common/float_ratio.h
  float* z0;           // the public logit
  double* base;
  double* total;      // sum of the models' delta - base
  float* partial;     // the part of that sum that is still in floats
  float* deviations;  // (models, width)
  std::int64_t width;
};

// The rows of all models at one position, read side by side.
class Deviations {
 public:
  static std::int64_t scratch_size(std::int64_t models) { return models * kConstants; }  // doubles

  Deviations(const Ensemble& in, const Weights& weights, std::int64_t position,
             Arithmetic arithmetic, double* memory)
      : in_(in),
        position_(position),
        arithmetic_(arithmetic),
        constants_(reinterpret_cast<Constants*>(memory)) {
    const double public_lse = in.public_lse[position];
    for (std::int64_t i = 0; i < in.shape.models; ++i) {
      const std::int64_t at = i * in.shape.positions + position;
      Constants& c = constants_[i];
      c.weight = weights.weight[at];
      c.difference = in.private_lse[at] - public_lse;
      c.shift = make_shift(in.private_lse[at], public_lse);
      c.slope = static_cast<float>(c.weight * (1.0 + c.shift.residual));
      c.offset = static_cast<float>(c.weight * c.shift.residual);
    }
  }

  // Returns whether the log-sum-exps are in the range of the float arithmetic.
  bool serves() const {
    bool all = std::fabs(in_.public_lse[position_]) < kFloatLargest + kFloatLogQ;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      all = all && std::fabs(constants_[i].difference) < kFloatDifference;
    }
    return all;
  }

  // Computes the deviations of tokens [begin, begin + length).
  template <Dtype D>
  void load(std::int64_t begin, std::int64_t length, const DeviationColumns& to) const {
    for (std::int64_t lane = 0; lane < to.width; lane += Vec::kLanes) {
      Vec(0.0).store(to.base + lane);
      Vec(0.0).store(to.total + lane);
    }
    for (std::int64_t lane = 0; lane < to.width; lane += Flt::kLanes) {
      Flt(0.0f).store(to.partial + lane);
    }
    if (arithmetic_.in_double) {
      load_base<D>(begin, length, to);
      load_all([&](auto count, std::int64_t first) {
        load_in_double<D, decltype(count)::value>(first, begin, length, to);
      });
    } else {
      load_all([&](auto count, std::int64_t first) {
        load_in_floats<D, decltype(count)::value>(first, begin, length, to);
        // At most 8 models are added in floats; if they are equal, their sum is still exact.
        constexpr int kCount = decltype(count)::value;
        if (kCount == 1 || (first / kGroup) % 2 == 1 || first + 2 * kGroup > in_.shape.models) {
          widen_partial(to);
        }
      });
    }
  }

 private:
  static constexpr int kGroup = 4;  // models whose rows are read side by side

  struct Constants {
    double weight, difference;
    FloatShift shift;
    float slope, offset;  // delta = slope (r' - 1) + offset
  };
  static constexpr std::int64_t kConstants = sizeof(Constants) / 8 + 1;

  template <int kCount>
  struct Count {
    static constexpr int value = kCount;
  };

  template <class Load>
  void load_all(const Load& load) const {
    std::int64_t i = 0;
    for (; i + kGroup <= in_.shape.models; i += kGroup) load(Count<kGroup>{}, i);
    for (; i < in_.shape.models; ++i) load(Count<1>{}, i);
  }

  const char* row(std::int64_t model) const {
    return row_of(in_.private_logits, model, position_).data;
  }

  // Calls step(lane, z), where z(g) reads the logits of row first + g at this lane.
  template <Dtype D, int kCount, class Step>
  ADAPMIXED_INLINE void for_each_lane(std::int64_t first, std::int64_t begin, std::int64_t length,
                                      const Step& step) const {
    const char *rows[kCount], *next[kCount];
    for (int g = 0; g < kCount; ++g) {
      const std::int64_t later = first + g + kCount;
      rows[g] = row(first + g);
      next[g] = row(later < in_.shape.models ? later : first + g);
    }
    std::int64_t lane = 0;
    for (; lane + Flt::kLanes <= length; lane += Flt::kLanes) {
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) {
        __builtin_prefetch(next[g] + (begin + lane) * kElementSize<D>);
      }
      step(lane, [&](int g) ADAPMIXED_INLINE { return load_whole<D>(rows[g], begin + lane); });
    }
    if (lane < length) {
      step(lane, [&](int g) { return load_floats<D>(rows[g], begin + lane, begin + length); });
    }
  }

  template <int kCount>
  ADAPMIXED_INLINE static Flt store(const Flt (&e)[kCount], std::int64_t first, std::int64_t lane,
                                    const DeviationColumns& to) {
    ADAPMIXED_UNROLL
    for (int g = 0; g < kCount; ++g) e[g].store(to.deviations + (first + g) * to.width + lane);
    if constexpr (kCount == 4) return (e[0] + e[1]) + (e[2] + e[3]);
    return e[0];
  }

  template <Dtype D, int kCount>
  void load_in_floats(std::int64_t first, std::int64_t begin, std::int64_t length,
                      DeviationColumns to) const {
    FloatShift shift[kCount];
    Flt slope[kCount], offset[kCount];
    for (int g = 0; g < kCount; ++g) {
      shift[g] = constants_[first + g].shift;
      slope[g] = Flt(constants_[first + g].slope);
      offset[g] = Flt(constants_[first + g].offset);
    }
    for_each_lane<D, kCount>(
        first, begin, length, [&](std::int64_t lane, const auto& logits) ADAPMIXED_INLINE {
          const Flt grid = Flt::load(to.grid + lane), rest = Flt::load(to.rest + lane);
          Flt e[kCount];
          ADAPMIXED_UNROLL
          for (int g = 0; g < kCount; ++g) {
            e[g] = vfma(ratio_excess(logits(g), grid, rest, shift[g]), slope[g], offset[g]);
          }
          const Flt total = store<kCount>(e, first, lane, to);
          (Flt::load(to.partial + lane) + total).store(to.partial + lane);
        });
  }

  static void widen_partial(const DeviationColumns& to) {
    for (std::int64_t lane = 0; lane < to.width; lane += Flt::kLanes) {
      const Flt partial = Flt::load(to.partial + lane);
      double* low = to.total + lane;
      double* high = low + Vec::kLanes;
      (Vec::load(low) + low_half(partial)).store(low);
      (Vec::load(high) + high_half(partial)).store(high);
      Flt(0.0f).store(to.partial + lane);
    }
  }

  ADAPMIXED_INLINE static Vec delta(Vec z, Vec z0, const Constants& c) {
    return Vec(c.weight) * ratio_excess((z - z0) - Vec(c.difference));
  }

  template <Dtype D>
  void load_base(std::int64_t begin, std::int64_t length, const DeviationColumns& to) const {
    if (arithmetic_.base_model < 0) return;
    const Constants& c = constants_[arithmetic_.base_model];
    for_each_lane<D, 1>(arithmetic_.base_model, begin, length,
                        [&](std::int64_t lane, const auto& logits) {
                          const Flt z = logits(0), z0 = Flt::load(to.z0 + lane);
                          delta(low_half(z), low_half(z0), c).store(to.base + lane);
                          delta(high_half(z), high_half(z0), c).store(to.base + lane + Vec::kLanes);
                        });
  }

  template <Dtype D, int kCount>
  void load_in_double(std::int64_t first, std::int64_t begin, std::int64_t length,
                      DeviationColumns to) const {
    const Constants* c = constants_ + first;
    for_each_lane<D, kCount>(
        first, begin, length, [&](std::int64_t lane, const auto& logits) ADAPMIXED_INLINE {
          const Flt public_logits = Flt::load(to.z0 + lane);
          Flt z[kCount];
          ADAPMIXED_UNROLL
          for (int g = 0; g < kCount; ++g) z[g] = logits(g);
          Vec e[2][kCount];
          for (int half = 0; half < 2; ++half) {
            const std::int64_t at = lane + half * Vec::kLanes;
            const Vec z0 = half ? high_half(public_logits) : low_half(public_logits);
            const Vec base = Vec::load(to.base + at);
            Vec total = Vec::load(to.total + at);
            ADAPMIXED_UNROLL
            for (int g = 0; g < kCount; ++g) {
              e[half][g] = delta(half ? high_half(z[g]) : low_half(z[g]), z0, c[g]) - base;
              total = total + e[half][g];
            }
            total.store(to.total + at);
          }
          Flt rounded[kCount];
          ADAPMIXED_UNROLL
          for (int g = 0; g < kCount; ++g) rounded[g] = narrow(e[0][g], e[1][g]);
          store<kCount>(rounded, first, lane, to);
        });
  }

  const Ensemble& in_;
  std::int64_t position_;
  Arithmetic arithmetic_;
  Constants* constants_;
};

ADAPMIXED_CORE_END
