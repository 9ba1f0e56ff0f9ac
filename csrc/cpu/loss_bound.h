// What single precision cost a leave-one-out loss, by the sums themselves.
//
// Notation: e_i = delta_i - base as a float, mu the mean of delta over the slots, F = 1 / (divisor
// (1 + mu)), x_i = (mu - delta_i) F; norms are sqrt(sum p y^2). Errors are in units (kFloatUnit).
//
// x_i. A float delta_i is off by 7.6 units of itself (kRatioUnits, the weight, a multiply-add) and
// by kRatioAbsolute (|delta_i| + weight_i); from mu it differs by x_i / F. Their mean, of which 3
// additions are in floats, is off by 10.6 units of the mean |delta_j|. In double e_i is off by its
// own rounding, and it differs from middle = mu - base by x_i / F; against the public distribution
// middle is 0. Last, middle, the difference, F and the product are rounded. So x_i is off by
//   own: 10.6 or 4 units of x_i;
//   shared, as a norm: 8.6 (or 2) units of middle F and 10.6 (or 0) of the mean |delta_j| F, which
//   is at most the norms of x_j, in the root mean square, and of mu F; besides the absolute errors;
//   growth, through the error eta of 1 + mu in F and p: 10.6 units of the mean |delta_j| / (1 +
//   mu), for which (mu + 2 mean weight) / (1 + mu) stands.
// The excess sum p c(x) moves by at most own sum p x c'(x), plus the norm of c'(x) times shared,
// plus eta sum p (x c'(x) - c(x)).
//
// Moments. p is off by 4 units besides eta; a term p t^{2+k} by 2 + k more, and 16 terms are added
// in floats.
#pragma once

#include "cpu/deviation_tile.h"
#include "cpu/loss_plan.h"

ADAPMIXED_CORE_BEGIN

// Relative error of a loss that the float sums may have; python adds loss_error, which is larger.
constexpr double kLossError = 9.8e-6;

// The sums of one position over all chunks.
struct PositionSums {
  const LossFit& fit;
  double* data;
  std::int64_t stride;
  TileSums tile;

  ModelSums model(std::int64_t i) const { return {data + i * stride, fit.degree}; }
  // sum p x^2.
  double second(std::int64_t i) const {
    const ModelSums m = model(i);
    return fit.reach * fit.reach * m.moments()[0] + m.listed_second();
  }
};

class LossBound {
 public:
  // ratio_error: of p/q in double.
  LossBound(const LossPlan& plan, const PositionSums& sums, bool in_double, double largest_weight,
            double ratio_error)
      : plan_(plan), sums_(sums) {
    double mean = 0.0;
    for (std::int64_t i = 0; i < plan.models; ++i) mean += sums.second(i);
    mean = std::sqrt(mean / static_cast<double>(plan.models));
    const double common = std::sqrt(sums.tile.common), middle = std::sqrt(sums.tile.middle);
    const double least = in_double ? DeviationTile::kLeastRatio[1] : DeviationTile::kLeastRatio[0];
    const double divisor = plan.against_public ? plan.slots : plan.slots - 1.0;
    const double u = kFloatUnit;
    const double one = in_double ? u : (kRatioUnits + 2.0) * u;          // of a delta
    const double all = in_double ? 0.0 : (kRatioUnits + 2.0 + 3.0) * u;  // of their mean
    const double absolute = ratio_error + (in_double ? 0.0 : kRatioAbsolute);
    own_ = one + 3.0 * u;
    shared_ = (one + u) * middle + (plan.against_public ? 0.0 : all * (mean + common));
    absolute_ =
        absolute * (2.0 * common + mean + 2.0 * largest_weight / (divisor * std::sqrt(least)));
    size_absolute_ = absolute;
    growth_ = (all + 2.0 * absolute) * sums.tile.growth;
    listed_ = ratio_error * (2.0 + 16.0 * (1.0 + sums.tile.growth) / (divisor * sums.fit.reach));
  }

  // Whether loss k of model i is within kLossError (or 1e-12 nats) of the truth; sets it.
  bool loss(std::int64_t i, std::int64_t k, double& result) const {
    const ModelSums m = sums_.model(i);
    const double order = plan_.options.orders[k], size = std::sqrt(sums_.second(i));
    const ListedSums& large = m.listed(k);
    const Sum forward = direction(sums_.fit.forward[k], m, size, large.forward, large.slope);
    const Sum reverse = direction(sums_.fit.reverse[k], m, size, large.reverse, large.slope);
    const double excess = std::fmax(std::fmax(forward.value, reverse.value), 0.0);
    result = std::log1p(excess) / (order - 1.0);
    if (!std::isfinite(forward.value) || !std::isfinite(reverse.value)) return false;
    const double allowed =
        std::fmax(kLossError * (1.0 + excess) * std::log1p(excess), 1e-12 * (order - 1.0));
    return forward.error <= allowed && reverse.error <= allowed;
  }

 private:
  struct Sum {
    double value, error;
  };

  Sum direction(const ExcessFit& fit, const ModelSums& m, double size, double listed,
                double listed_slope) const {
    const int degree = sums_.fit.degree;
    const double u = kFloatUnit;
    const double* moments = m.moments();
    double slope, unused;
    const double bulk = fit.excess.sum(moments, degree, slope);
    const double squared_slope =
        fit.squared_slope.sum(moments, degree, unused) + fit.squared_slope.error * moments[0];
    const double error =
        own_ * std::fabs(slope) +
        (shared_ + absolute_ + size_absolute_ * size) * std::sqrt(std::fmax(squared_slope, 0.0)) +
        growth_ * std::fabs(slope - bulk) + fit.excess.rounding(moments, degree, 22.0 * u, u) +
        fit.excess.error * moments[0] + 3.0 * u * std::fabs(listed) + listed_ * listed_slope;
    return {bulk + listed, error};
  }

  const LossPlan& plan_;
  const PositionSums& sums_;
  double own_, shared_, absolute_, size_absolute_, growth_, listed_;
};

ADAPMIXED_CORE_END
