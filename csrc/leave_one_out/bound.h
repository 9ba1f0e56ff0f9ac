// What is added to a leave-one-out loss for the errors of single precision, so that it is never
// under-reported. It is computed from the sums themselves.
//
// Notation: delta_j = p_bar_j / q - 1, mu its mean over the slots, F = 1 / (divisor (1 + mu)),
// middle = mu, or 0 against the public distribution, x = (middle - delta) F, c(x) the excess
// (1+x)^s - 1 - s x. Norms are sqrt(sum p y^2). Errors are in units (kFloatUnit).
//
// Errors of x. delta is off by kRatioUnits, two roundings, and kRatioAbsolute (|delta| + weight);
// it differs from middle by x / F. mu has three additions in floats more, of terms whose sizes add
// up to N mean|delta|. middle, the difference, F and the product are rounded; or F, its product
// with middle and, once, middle F - delta F. So x is off by
//   own: kOwn units of x;
//   shared, as a norm: 9.6 units of middle F and kMean units of mean|delta| F, which is at most the
//   mean of the norms of x_j plus that of mu F; plus the absolute errors;
//   growth: what 1 + mu is off by, in F and p: kMean units of mean|delta| / (1 + mu), which is at
//   most (mu + 2 mean weight) / (1 + mu).
// Of tokens that are computed in double, p_bar / q is off by what the log-sum-exps leave and by the
// rounding of its sum over the slots; p_bar / q F is at most 1 / divisor + |x|, or 1 against q.
//
// A sum of p c(x) therefore moves by at most own times sum p x c'(x), shared times the norm of c',
// growth times sum p (x c'(x) - c(x)), and half the largest c'' times the squared norm of x's
// error. A listed term moves by at most (3 + 1.5 |s log X|) c times the relative error of x, or of
// X if X < 1/2 (found by trying), by that of p, and by the error of power_excess. The shared part
// of x's error is relative to |x|. In double p, x and X are off by 4 units at most.
#pragma once

#include <cmath>

#include "common/float_power.h"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr double kOwn = kRatioUnits + 5.0, kMean = kRatioUnits + 5.0;

// The most additions in floats through which a term of a moment goes.
constexpr int kMomentAdditions = 20;

// Tokens with less of q in the mixture are computed in double.
constexpr double kLeastRatio = 0.5;

// A bound on the norm of the x that are so small that a term of a moment is 0 in floats.
constexpr double kLostNorm = 2e-16;

// Excesses of orders nearer to 1 are computed in double.
constexpr double kLeastFloatOrder = 1.1;

// Whether there are so few slots that everything is computed in double: what models share is not
// small against their differences over N. An error e of x adds order e^2 / (2 r) to r times a loss;
// e is at most 20 units / N, and r 1e-4, or 4e-4 beyond order 32.
ADAPMIXED_HD bool few_slots(const Neighbours& all) {
  return all.slots < std::fmax(16.0, 1.0 + 1.34 * std::sqrt(all.largest_order));
}

// Tokens with a smaller q than kLeastFloatQ are, too. Those rarer than e^kRarest count as that
// rare, which overstates losses.
constexpr double kLeastFloatQ = 1e-27, kRarest = -75.0;
// log p/q above this is cut off. With less than kLeastTotal of p_bar / q in all, X leaves the range
// of floats.
constexpr double kMostLogRatio = 700.0, kLeastTotal = 1e-37;

// Whether no loss can be bounded because of a token. lost: of mixture_token. answered: some p is
// not 0. Where no model answers, nothing is lost, unless q does in one's place.
template <class T>
ADAPMIXED_HD_INLINE MaskOf<T> unbounded(const Neighbours& all, const MixtureToken<T>& token,
                                        MaskOf<T> lost, MaskOf<T> answered, T q, T log_q) {
  const auto far = (T(kLeastTotal) > token.total) & (q > T(0.0));
  const auto overstated = (log_q < T(kRarest)) & (token.p > T(1e-20));
  return (all.against_public ? lost | far : lost & answered) | overstated;
}

// x as it is kept in a float: -1/X below -1/2, where 1 + x would cancel. No x is below -1.
template <class T>
ADAPMIXED_HD_INLINE T kept(T x, T X) {
  return vselect(T(-0.5) > x, T(-1.0) / X, x);
}
struct Neighbour {
  double x, X;
};
ADAPMIXED_HD Neighbour neighbour_of(double kept) {
  const double X = kept < -1.25 ? -1.0 / kept : 1.0 + kept;
  return {kept < -1.25 ? X - 1.0 : kept, X};
}

// Sums over the tokens of a position in single precision, but for `balance`, which is over all.
struct TokenSums {
  double balance = 0.0;      // sum q mu
  double common = 0.0;       // the squared norm of middle F
  double most_common = 0.0;  // the largest |middle F|
  double growth = 0.0;       // the largest (mu + 2 mean weight) / (1 + mu)

  ADAPMIXED_HD void add(const TokenSums& other) {
    balance += other.balance;
    common += other.common;
    most_common = std::fmax(most_common, other.most_common);
    growth = std::fmax(growth, other.growth);
  }
};

// Sums over listed tokens: of p c with the error of the power; of w = p c (3 + 1.5 |s log X|); of w
// over tokens in single precision, and of w reach / |x| over these.
struct ListedSums {
  double value = 0.0, weight = 0.0, rough = 0.0, near = 0.0;

  // Adds sums of p c, p c |log X|, and the same times reach / |x|. in_floats: of power_excess.
  ADAPMIXED_HD void add(const double (&sums)[4], double s, bool in_floats, bool rough_tokens) {
    const double weighed = 3.0 * sums[0] + 1.5 * std::fabs(s) * sums[1];
    value += sums[0];
    if (in_floats) {
      const double from_one = std::fmin(std::fabs(s), std::fabs(s - 1.0));
      value += kFloatUnit * ((130.0 + 40.0 / from_one) * sums[0] + 4.0 * std::fabs(s) * sums[1]);
    }
    weight += weighed;
    if (!rough_tokens) return;
    rough += weighed;
    near += 3.0 * sums[2] + 1.5 * std::fabs(s) * sums[3];
  }
};

// A view of the sums of one model over a chunk, later over a position.
struct ModelSums {
  ADAPMIXED_HD static std::int64_t size(int degree, std::int64_t orders) {
    return 2 + degree + 8 * orders;
  }

  double* data;
  int degree;

  ADAPMIXED_HD double& first() const { return data[0]; }          // sum p x
  ADAPMIXED_HD double& listed_second() const { return data[1]; }  // sum p x^2 of listed tokens
  ADAPMIXED_HD double* moments() const { return data + 2; }       // sum p t^{2+k}, x = reach t
  ADAPMIXED_HD double second(double reach) const {                // sum p x^2
    return reach * reach * moments()[0] + listed_second();
  }
  ADAPMIXED_HD ListedSums& listed(std::int64_t k, bool reverse) const {
    return reinterpret_cast<ListedSums*>(data + 2 + degree)[2 * k + reverse];
  }
};

// What the losses of one position share.
class LossBound {
 public:
  // mean_norm: the mean over the models of the norm of x. largest_weight: of the position.
  // ratio_error: the largest relative error of p/q from the log-sum-exps.
  ADAPMIXED_HD LossBound(const Neighbours& all, double reach, int degree, const TokenSums& tokens,
                         double mean_norm, double largest_weight, double ratio_error)
      : reach_(reach), degree_(degree) {
    const double u = kFloatUnit, rounded = kRatioAbsolute + ratio_error;
    const double divisor = all.against_public ? all.slots : all.slots - 1.0;
    const double common = std::sqrt(tokens.common);
    // A bound on the norm of weight F, and on weight F itself, if any token is in floats.
    const double largest = tokens.growth > 0.0 ? largest_weight : 0.0;
    const double weight = largest / divisor / std::sqrt(kLeastRatio);
    const double most_weight = largest / divisor / kLeastRatio;
    growth_ = (kMean * u + 2.0 * rounded) * tokens.growth;
    own_ = kOwn * u + rounded;
    shared_ = 9.6 * u * common + 2.0 * rounded * (common + weight);
    double most = 9.6 * u * tokens.most_common + 2.0 * rounded * (tokens.most_common + most_weight);
    if (!all.against_public) {
      shared_ += (kMean * u + rounded) * (mean_norm + common);
      most += (kMean * u + rounded) * tokens.growth / divisor;
    }
    const double in_double =
        (ratio_error + all.slots * 0x1p-53) * (all.against_public ? 1.0 : 2.0 / divisor);
    shared_ += in_double;
    listed_ = 4.0 * u + ratio_error + in_double / reach;
    rough_ = own_ + 1.4 * growth_;
    near_ = most / reach;
  }

  // An upper bound on the sum of excesses of one direction, s = order or 1 - order.
  template <class Moments>
  ADAPMIXED_HD double excess(const ExcessFit& fit, const Moments& moments, const ListedSums& listed,
                             double order) const {
    const double u = kFloatUnit;
    double slope, unused;
    const double bulk = fit.excess.sum(moments, degree_, slope);
    const double squared_slope =
        fit.squared_slope.sum(moments, degree_, unused) + fit.squared_slope.error * moments[0];
    const double size = reach_ * std::sqrt(moments[0]), moved = own_ * size + shared_ + kLostNorm;
    // |c''| = order (order - 1) (1 + x)^s', s' = order - 2 or -order - 1.
    const double curvature = order * (order - 1.0) * std::exp(-(order + 1.0) * std::log1p(-reach_));
    const double error = own_ * std::fabs(slope) +
                         shared_ * std::sqrt(std::fmax(squared_slope, 0.0)) +
                         growth_ * std::fabs(slope - bulk) +
                         fit.excess.rounding(moments, degree_, (6.0 + kMomentAdditions) * u, u) +
                         fit.excess.error * moments[0] + 0.5 * curvature * moved * moved;
    return bulk + error + listed.value + listed.weight * listed_ + listed.rough * rough_ +
           listed.near * near_;
  }

 private:
  double reach_;
  int degree_;
  double own_, shared_, growth_, listed_, rough_, near_;
};

ADAPMIXED_CORE_END
