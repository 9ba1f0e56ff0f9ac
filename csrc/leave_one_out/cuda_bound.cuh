// A bound on the error that single precision causes in a leave-one-out loss, computed from the sums
// themselves.
//
// Notation: e_i = delta_i - base as a float, mu the mean of delta over the slots,
// F = 1 / (divisor (1 + mu)), x_i = (mu - delta_i) F. Norms are sqrt(sum p y^2). Errors are in
// units (kFloatUnit).
//
// The error of x_i. In floats, delta_i is off by 7.6 units of itself (kRatioUnits, the weight, a
// multiply-add) and by kRatioAbsolute (|delta_i| + weight_i); it differs from mu by x_i / F. The
// mean of the delta_j, of which 3 additions are in floats, is off by 10.6 units of the mean
// |delta_j|. In double, e_i is off by its own rounding, and it differs from middle = mu - base by
// x_i / F; against the public distribution middle is 0. Last, middle, the difference, F and the
// product are rounded; or F, its product with middle and, once, middle F - e_i F. So x_i is off by
//   own: 10.6 (floats) or 4 (double) units of x_i;
//   shared, as a norm: 9.6 (or 3) units of middle F, plus 10.6 (or 0) units of the mean
//   |delta_j| F, which is at most the mean of the norms of x_j plus that of mu F; plus the absolute
//   errors;
//   growth, through the error eta of 1 + mu in F and p: 10.6 (or 0) units of the mean
//   |delta_j| / (1 + mu), which is replaced by its upper bound (mu + 2 mean weight) / (1 + mu).
// A position may have tokens of both kinds. Then own and the factor of middle F are those of floats
// for all tokens; what is 0 in double takes its norm and maximum over the tokens in floats alone.
// The excess sum p c(x) moves by at most own sum p x c'(x), plus the norm of c'(x) times shared,
// plus eta sum p (x c'(x) - c(x)), and in second order by half the largest c'' within reach times
// the square of the norm of x's error. If the computed x are 0, only the second-order term is left.
//
// Listed tokens. Their own delta is in double. If mu is computed in floats, x is off by
// eta (|x| + 1 / divisor) and p by eta, where eta uses the mean |delta_j| itself. An excess is at
// most x times its derivative. In addition p is off by 4 units.
//
// Moments. In addition to eta, p is off by 4 units, and a term p t^{2+k} by 2 + k more; it
// takes part in kMomentAdditions additions in floats. On CUDA a moment is a sum of multiples of a
// unit, and off by moment_error at most. That includes what the same does to the other terms of the
// bound, which is far smaller.
#pragma once

#include <cmath>

#include "common/float_ratio.h"
#include "leave_one_out/fit.h"

ADAPMIXED_CORE_BEGIN

// The largest relative error of a loss from the float sums. Python adds loss_error, which is
// larger.
constexpr double kLossError = 9.8e-6;

// The most additions in floats through which a term of a moment goes.
constexpr int kMomentAdditions = 20;

// With fewer slots most x are large, so everything is computed in double from the start.
constexpr double kFewSlots = 4.0;

// Deviations are computed in double if the models have much in common: the mean of delta, as a norm
// over some tokens, exceeds kMostCommon times the models' distance from it. The CPU takes
// kSampledTokens of the row, CUDA each tile.
constexpr int kSampledTokens = 64;
constexpr double kMostCommon = 0.8;

// A token whose mixture is below this multiple of q is handled by itself. The limit depends on
// whether deviations are computed in floats or in double.
ADAPMIXED_HD double least_ratio(bool in_double) { return in_double ? 1e-3 : 0.25; }

// Sums of the excess over listed tokens, and sums of the larger of their two slopes by log x:
// rough_slope for tokens whose mean over the models is in floats, slope for the others.
struct ListedSums {
  double forward, reverse, rough_slope, slope;
};

// A view of the sums of one model over a chunk, later over a position.
struct ModelSums {
  ADAPMIXED_HD static std::int64_t size(int degree, std::int64_t orders) {
    return 2 + degree + 4 * orders;
  }

  double* data;
  int degree;

  ADAPMIXED_HD double& first() const { return data[0]; }          // sum p x
  ADAPMIXED_HD double& listed_second() const { return data[1]; }  // sum p x^2 beyond the reach
  ADAPMIXED_HD double* moments() const { return data + 2; }       // sum p t^{2+k}, |t| <= 1
  ADAPMIXED_HD double moment_error() const { return 0.0; }
  // The excesses beyond the reach.
  ADAPMIXED_HD ListedSums& listed(std::int64_t k) const {
    return reinterpret_cast<ListedSums*>(data + 2 + degree)[k];
  }
  // sum p x^2.
  ADAPMIXED_HD double second(double reach) const {
    return reach * reach * moments()[0] + listed_second();
  }
};

// Sums over all tokens of a position. Norms are squared.
struct TokenSums {
  double balance = 0.0;                           // sum q mu
  double common = 0.0;                            // norm of mu F
  double middle = 0.0;                            // norm of (mu - base) F
  double growth = 0.0;                            // the largest (mu + 2 mean weight) / (1 + mu)
  double float_common = 0.0, float_growth = 0.0;  // the same of tokens with deviations in floats
  double rough = 0.0;  // the largest mean |delta_j| / (1 + mu) of listed tokens with a float mu

  ADAPMIXED_HD void add(const TokenSums& other) {
    balance += other.balance;
    common += other.common;
    middle += other.middle;
    growth = std::fmax(growth, other.growth);
    float_common += other.float_common;
    float_growth = std::fmax(float_growth, other.float_growth);
    rough = std::fmax(rough, other.rough);
  }
};

// The largest weight of a position, and the largest error of p/q in double.
struct LossPrecision {
  double largest_weight, ratio_error;
};

class LossBound {
 public:
  // mean_norm: the mean over the models of the norm of x.
  ADAPMIXED_HD LossBound(const Neighbours& all, double reach, int degree, const TokenSums& sums,
                         const LossPrecision& precision, double mean_norm)
      : reach_(reach), degree_(degree) {
    const double u = kFloatUnit;
    // Without deviations in floats this is 0. It is 0 with them only if all weights are.
    const bool floats = sums.float_growth > 0.0;
    const double one = floats ? (kRatioUnits + 2.0) * u : u;           // error of a delta
    const double mean = floats ? (kRatioUnits + 2.0 + 3.0) * u : 0.0;  // error of mu
    const double exact = precision.ratio_error, rounded = floats ? kRatioAbsolute : 0.0;
    const double divisor = all.against_public ? all.slots : all.slots - 1.0;
    const double common = std::sqrt(sums.common), float_common = std::sqrt(sums.float_common);
    // A bound on the norm of weight F.
    const auto weights = [&](bool in_double) {
      return precision.largest_weight / (divisor * std::sqrt(least_ratio(in_double)));
    };
    own_ = one + 3.0 * u;
    shared_ = (one + 2.0 * u) * std::sqrt(sums.middle) +
              (all.against_public ? 0.0 : mean * (mean_norm + float_common)) +
              exact * (2.0 * common + mean_norm + 2.0 * weights(true)) +
              rounded * (2.0 * float_common + mean_norm + 2.0 * weights(false));
    size_absolute_ = exact + rounded;
    growth_ = (mean + 2.0 * rounded) * sums.float_growth + 2.0 * exact * sums.growth;
    rough_ = (mean + 2.0 * (exact + rounded)) * sums.rough * (2.0 + 1.0 / (divisor * reach));
    listed_ = precision.ratio_error * (2.0 + 16.0 * (1.0 + sums.growth) / (divisor * reach));
  }

  // The excess of one direction, and a bound on its error but for the second order.
  struct Excess {
    double value, error;
  };

  // Sums: ModelSums, or what has the same members. size: the norm of x. own_listed: the direction's
  // part of `listed`.
  template <class Sums, class T>
  ADAPMIXED_HD Excess direction(const ExcessFitView<T>& fit, const Sums& m, double size,
                                double own_listed, const ListedSums& listed) const {
    const double u = kFloatUnit;
    const auto moments = m.moments();
    double slope, unused;
    const double bulk = fit.excess.sum(moments, degree_, slope);
    const double squared_slope = fit.squared_slope.sum(moments, degree_, unused) +
                                 fit.squared_slope.error * moments[0] +
                                 m.moment_error() * fit.squared_slope.size(degree_);
    const double error =
        own_ * std::fabs(slope) +
        (shared_ + size_absolute_ * size) * std::sqrt(std::fmax(squared_slope, 0.0)) +
        growth_ * std::fabs(slope - bulk) +
        fit.excess.rounding(moments, degree_, (6.0 + kMomentAdditions) * u, u) +
        fit.excess.error * moments[0] + m.moment_error() * fit.excess.size(degree_) +
        4.0 * u * std::fabs(own_listed) + rough_ * listed.rough_slope +
        listed_ * (listed.slope + listed.rough_slope);
    return {bulk + own_listed, error};
  }

  // Computes the loss from both directions. Returns whether it is within kLossError (or 1e-12 nats)
  // of the truth.
  ADAPMIXED_HD bool loss(const Excess& forward, const Excess& reverse, double size, double order,
                         double& result) const {
    // |c''| = order (order - 1) (1 + x)^s, s = order - 2 or -order - 1.
    const double moved = own_ * size + shared_ + size_absolute_ * size;
    const double curvature = order * (order - 1.0) * std::exp(-(order + 1.0) * std::log1p(-reach_));
    const double second_order = 0.5 * curvature * moved * moved;
    const double excess = std::fmax(std::fmax(forward.value, reverse.value), 0.0);
    result = std::log1p(excess) / (order - 1.0);
    if (!std::isfinite(forward.value) || !std::isfinite(reverse.value)) return false;
    const double allowed =
        std::fmax(kLossError * (1.0 + excess) * std::log1p(excess), 1e-12 * (order - 1.0));
    return forward.error + second_order <= allowed && reverse.error + second_order <= allowed;
  }

 private:
  double reach_;
  int degree_;
  double own_, shared_, size_absolute_, growth_, rough_, listed_;
};

ADAPMIXED_CORE_END
