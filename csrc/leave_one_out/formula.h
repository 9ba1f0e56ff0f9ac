// One token of the leave-one-out sums, relative to the public distribution, and what is added to a
// loss for the errors of single precision, so that it is never under-reported.
//
// With Y_i = p_bar_i / q and S = sum_i Y_i (absent slots count Y = 1), p = q S / N and
// p' = p (1 + x_i), where
//   add/remove: 1 + x_i = (S - Y_i) N / (S (N - 1)),   zero-out: 1 + x_i = (S - Y_i + 1) / S.
// Both directions sum the excess p((1+x)^s - 1 - s x) for s = alpha and s = 1 - alpha; its linear
// part vanishes in the sum. Templates over T as in common/elementary.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "common/excess_fit.h"
#include "common/float_power.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

template <class T>
using MaskOf = decltype(std::declval<T>() < std::declval<T>());

// Tokens with a smaller q are computed in double. Those rarer than e^kRarest count as that rare,
// which overstates losses.
constexpr double kLeastFloatQ = 1e-27, kRarest = -75.0;
constexpr double kLeastFloatOrder = 1.1;  // excesses of orders nearer to 1 are computed in double
// log p/q above this is cut off. With less than kLeastTotal of p_bar / q in all, X leaves the range
// of floats.
constexpr double kMostLogRatio = 700.0, kLeastTotal = 1e-37;
constexpr double kHidden = 1e-300;  // for sum p t^2 of rows that floats take for the public one

// The neighbouring mixtures of one call, the same for all tokens.
struct Neighbours {
  std::int64_t models;
  double slots, absent;  // N, and how many of these answer q
  bool against_public;   // without the model q answers: for it, or because nothing is left
  double divisor;        // N, or N - 1
  double largest_order;
  double least_ratio;  // tokens with less of p/q in the mixture are computed in double
  bool in_double;      // everything is

  // With few slots what models share is not small against their differences over N. An error e of
  // x adds order e^2 / (2 r) to r = 1e-4 times a loss: at most 1e-9 up to 40 sqrt(1 / least_ratio -
  // 1) units / divisor. Half of that is for mu, the other half for models that differ.
  ADAPMIXED_HD Neighbours(const Shape& shape, bool box, const LeaveOneOutOptions& options)
      : models(shape.models),
        slots(static_cast<double>(options.num_models)),
        absent(slots - static_cast<double>(shape.models)),
        against_public(options.zero_out || options.num_models == 1),
        divisor(against_public ? slots : slots - 1.0),
        largest_order(largest_of(options.orders, options.num_orders)),
        least_ratio(std::fmax(0.05, 1.0 / (1.0 + divisor * divisor / (28.8 * largest_order)))),
        in_double(box || slots < 16.0 || least_ratio > 0.5) {}

  // With these moments few x are listed one by one: |x| is about weight / slots times |r - 1|.
  ADAPMIXED_HD MomentChoice moments(double largest_weight) const {
    return choose_moments(largest_order, (0.5 + 5.0 * largest_weight) / slots);
  }

  // sum q delta of a model. first: sum p x, which is -(sum q delta) / slots against the public
  // distribution, else mean - sum q delta over slots - 1. mean: sum q mu.
  ADAPMIXED_HD double balance(double first, double mean) const {
    return against_public ? -slots * first : mean - divisor * first;
  }
};

// What all models share at a token in single precision, in the notation below, from the sum of
// delta and the largest delta or size of one. `fails`: it must be computed in double, because q is
// tiny, the mixture far below q or nearly all of one model, or the errors of a listed x large.
template <class T>
struct FloatMixture {
  T mean, p, middle, factor, shared, growth;  // shared: |middle F|
  MaskOf<T> fails;
};

template <class T>
ADAPMIXED_HD_INLINE FloatMixture<T> float_mixture(const Neighbours& all, T q, T total, T largest,
                                                  double mean_weight) {
  const T mean = total / T(all.slots), ratio = T(1.0) + mean;
  const T inverse = T(1.0) / vmax(ratio, T(1e-30)), factor = inverse * T(1.0 / all.divisor);
  const T middle = all.against_public ? T(0.0) : mean;
  // Errors of listed terms (FloatErrors::of) grow with order |x| and growth: here up to 1e-4.
  const T up = (middle + T(1.0)) * factor, down = (largest - middle) * factor;
  const T reach = vmax(up, down) * T(all.largest_order);
  const T error = T(2.4) * ratio + T(1.4 * (2.0 * mean_weight - 1.0));
  const MaskOf<T> fails = (ratio < T(all.least_ratio)) | (q < T(kLeastFloatQ)) | (T(0.45) < down) |
                          (T(63.0) * ratio < (reach + T(2.0)) * error);
  const T growth = (mean + T(2.0 * mean_weight)) * inverse;
  return {mean, q * ratio, middle, factor, vabs(middle) * factor, growth, fails};
}

// The same in double.
template <class T>
struct MixtureToken {
  T p, total;         // total: N p / q
  Projected<T> mean;  // p / q - 1 and p / q
  T scale;            // x per unit of the difference between mean and model
  MaskOf<T> lost;     // the mixture is 0 or near the end of the range of double; then p = 0
};

template <class T>
ADAPMIXED_HD_INLINE MixtureToken<T> mixture_token(const Neighbours& all, T q,
                                                  const Projected<T>& mean) {
  const T total = mean.ratio * T(all.slots), p = q * mean.ratio;
  const MaskOf<T> lost = (q > T(0.0)) & ((mean.ratio < T(1e-280)) | (p < T(1e-290)));
  return {vselect(lost, T(0.0), p), total, mean,
          all.against_public ? T(-1.0) / total : T(1.0 / all.divisor) / mean.ratio, lost};
}

// p_bar / q of one model from its logit and the public one. Sets `answered` where p is not 0.
template <class T>
ADAPMIXED_HD_INLINE Projected<T> answer_of(const Ensemble& in, const Weights& weights,
                                           std::int64_t model, std::int64_t position, T z, T z0,
                                           MaskOf<T>& answered) {
  const std::int64_t at = model * in.shape.positions + position;
  const double lse = in.private_lse[at];
  const T weight(weights.weight[at]), rest(rest_of(weights, at));
  const T log_ratio = z - z0 - T(lse - in.public_lse[position]);
  const T t = vmin(T(kMostLogRatio), log_ratio);
  answered = answered | (log_ratio > T(kMaskedLog));
  if (!(weights.upper > 0.0)) {
    const Ratio<T> r = ratio(t);
    return {weight * r.d, vfma(weight, r.r, rest)};
  }
  if (weights.active != nullptr && !weights.active[at]) return {T(0.0), T(1.0)};
  return clipped(vselect(z < T(least_clipped(lse)), T(-HUGE_VAL), t), weight, rest,
                 T(weights.lower), T(weights.upper));
}

// A token in double. answer(i) is p_bar / q of model i, and sets `answered` where p is not 0.
// `unbounded`: no loss can be bounded because of the token. Where no model answers, nothing is
// lost, unless q does in one's place.
ADAPMIXED_HD_CALLBACK
template <class T, class Answer>
ADAPMIXED_HD_INLINE MixtureToken<T> load_token(const Neighbours& all, T q, T log_q,
                                               const Answer& answer, const MaskOf<T>& answered,
                                               MaskOf<T>& unbounded) {
  Projected<T> total{T(0.0), T(all.absent)};
  for (std::int64_t i = 0; i < all.models; ++i) {
    const Projected<T> own = answer(i);
    total = {total.excess + own.excess, total.ratio + own.ratio};
  }
  const MixtureToken<T> token =
      mixture_token<T>(all, q, {total.excess / T(all.slots), total.ratio / T(all.slots)});
  const MaskOf<T> far = (T(kLeastTotal) > token.total) & (q > T(0.0));
  const MaskOf<T> overstated = (log_q < T(kRarest)) & (token.p > T(1e-20));
  unbounded = (all.against_public ? token.lost | far : token.lost & answered) | overstated;
  return token;
}

// x of model i as it is kept in a float: -1/X below -1/2, where 1 + x would cancel; x >= -1.
ADAPMIXED_HD_CALLBACK
template <class T, class Answer>
ADAPMIXED_HD_INLINE T kept_neighbour(const Neighbours& all, const MixtureToken<T>& token,
                                     std::int64_t model, const Answer& answer) {
  const Projected<T> own = answer(model);
  T x = own.excess;
  if (!all.against_public) {
    // Differences of p_bar / q - 1 are exact if p is near q, those of p_bar / q if p << q.
    x = vselect(token.mean.ratio >= T(0.5), token.mean.excess - own.excess,
                token.mean.ratio - own.ratio);
  }
  x = x * token.scale;
  const auto counted = token.p > T(0.0), low = T(-0.5) > x;
  T X = x + T(1.0);
  // If one model makes up nearly all of the mixture, S - Y_i cancels. Below that X has ten times
  // the error of S.
  const auto dominated = counted & low & (own.ratio > T(0.9) * token.total);
  if (any(dominated)) {
    T rest(all.absent);
    for (std::int64_t j = 0; j < all.models; ++j) {
      if (j != model) rest = rest + answer(j).ratio;
    }
    const T others = all.against_public ? rest + T(1.0) : rest * T(all.slots / all.divisor);
    X = vselect(dominated, others / token.total, X);
  }
  return vselect(counted, vselect(low, T(-1.0) / X, x), T(0.0));
}

struct Neighbour {
  double x, X;

  ADAPMIXED_HD explicit Neighbour(double kept) : x(kept), X(1.0 + kept) {
    if (kept < -1.25) X = -1.0 / kept, x = X - 1.0;
  }
};

// The bound. Notation: delta_j = p_bar_j / q - 1, mu its mean over the slots, F = 1 / (divisor (1 +
// mu)), middle = mu, or 0 against the public distribution, x = (middle - delta) F, c(x) the excess
// (1+x)^s - 1 - s x. Norms are sqrt(sum p y^2). Errors are in units (kFloatUnit).
//
// Errors of x. delta is off by kRatioUnits, two roundings, and kRatioAbsolute (|delta| + weight);
// it differs from middle by x / F. mu has three additions in floats more, of terms whose sizes add
// up to N mean|delta|. F, its product with middle and, once, middle F - delta F are rounded. So x
// is off by
//   own: kOwn units of x;
//   shared, as a norm: 9.6 units of middle F and kMean units of mean|delta| F, which is at most the
//   mean of the norms of x_j plus that of mu F; plus the absolute errors;
//   growth: what 1 + mu is off by, in F and p: kMean units of mean|delta| / (1 + mu), which is at
//   most (mu + 2 mean weight) / (1 + mu).
// Of tokens that are computed in double, p_bar / q is off by what the log-sum-exps leave and by the
// rounding of its sum over the slots; p_bar / q F is at most 1 / divisor + |x|, or 1 against q.
//
// A sum of p c(x) therefore moves by at most own times sum p x c'(x); the lesser of shared times
// the norm of c' and its largest value times sum p |c'(x)|; growth times sum p (x c'(x) - c(x));
// and half the largest c'' times the squared norm of x's error. A listed term moves by at most (3 +
// 1.5 |s log X|) c (found by trying) times the error of x, or of X if X < 1/2, by that of p, and by
// that of power_excess. The shared part of x's error is relative to |x|. In double p, x and X are
// off by 4 units.
constexpr double kOwn = kRatioUnits + 5.0, kMean = kOwn;  // FloatErrors::own stands for both
constexpr int kMomentAdditions = 20;  // the most in floats through which a term of a moment goes
constexpr double kLostNorm = 2e-16;   // the largest of x whose terms of a moment are 0 in floats

// Sums over the tokens of a position in single precision, but for `balance`, which is over all.
struct TokenSums {
  double balance = 0.0;      // sum q mu
  double common = 0.0;       // the squared norm of middle F
  double most_common = 0.0;  // the largest |middle F|
  double growth = 0.0;       // the largest (mu + 2 mean weight) / (1 + mu); inf: nothing is bounded
};

// The errors of x at a position's tokens in single precision.
struct FloatErrors {
  double largest_weight, mean_weight, divisor, own, growth;  // growth: for each unit of growth
  double rounded, spread;  // absolute errors; what mean|delta| F adds, for each unit of growth

  // ratio_error: the largest relative error of p/q from the log-sum-exps.
  ADAPMIXED_HD FloatErrors(const Neighbours& all, double largest, double mean, double ratio_error)
      : largest_weight(largest),
        mean_weight(mean),
        divisor(all.divisor),
        own(kOwn * kFloatUnit + kRatioAbsolute + ratio_error),
        growth(kMean * kFloatUnit + 2.0 * (kRatioAbsolute + ratio_error)),
        rounded(2.0 * (kRatioAbsolute + ratio_error)),
        spread(all.against_public ? 0.0 : own / divisor) {}

  // From |middle F| and weight F.
  ADAPMIXED_HD double shared(double middle, double weight) const {
    return 9.6 * kFloatUnit * middle + rounded * (middle + weight);
  }
  // Relative to x, of a listed token. 1.4: growth moves p, too.
  ADAPMIXED_HD double of(double x, double middle, double factor) const {
    const double grown = 1.0 + (2.0 * mean_weight - 1.0) * divisor * factor;
    const double absolute = shared(middle, largest_weight * factor) + spread * grown;
    return own + 1.4 * growth * grown + absolute / std::fabs(x);
  }
};

// Sums over listed tokens: of p c with the error of the power; of w = p c (3 + 1.5 |s log X|); of w
// times the relative error of x.
struct ListedSums {
  double value = 0.0, weight = 0.0, rough = 0.0;

  // Adds sums of p c, p c |log X|, and the same times that error. in_floats: of power_excess.
  ADAPMIXED_HD void add(const double (&sums)[4], double s, bool in_floats) {
    const double size = std::fabs(s);
    value += sums[0];
    if (in_floats) {
      const double from_one = std::fmin(size, std::fabs(s - 1.0));
      value += kFloatUnit * ((130.0 + 40.0 / from_one) * sums[0] + 4.0 * size * sums[1]);
    }
    weight += 3.0 * sums[0] + 1.5 * size * sums[1];
    rough += 3.0 * sums[2] + 1.5 * size * sums[3];
  }
};

// The sums of one model over a chunk, later over a position: sum p x, sum p x^2 of listed tokens,
// sum p |t| of the others, x = reach t, ListedSums of both directions for each order, and moments
// sum p t^{2+k}.
struct ModelSums {
  double* data;
  std::int64_t stride, orders;  // stride: from one number to the next

  ADAPMIXED_HD static std::int64_t columns(int degree, std::int64_t orders) {
    return 3 + 6 * orders + degree;
  }
  ADAPMIXED_HD double& operator[](std::int64_t at) const { return data[at * stride]; }
  ADAPMIXED_HD ModelSums from(std::int64_t at) const { return {&(*this)[at], stride, orders}; }
  ADAPMIXED_HD ModelSums listed(std::int64_t k, bool reverse) const {
    return from(3 + 6 * k + 3 * reverse);
  }
  ADAPMIXED_HD ModelSums moments() const { return from(columns(0, orders)); }
  ADAPMIXED_HD double second(double reach) const {  // sum p x^2
    return reach * reach * moments()[0] + (*this)[1];
  }
};

// What the losses of one position share.
class LossBound {
 public:
  // mean_norm: the mean over the models of the norm of x.
  ADAPMIXED_HD LossBound(const Neighbours& all, const MomentChoice& moments,
                         const TokenSums& tokens, double mean_norm, const FloatErrors& errors,
                         double ratio_error)
      : all_(all), moments_(moments), mean_norm_(mean_norm), own_(errors.own) {
    const double common = std::sqrt(tokens.common);
    // weight F is at most this / least_ratio, and its norm this / sqrt(least_ratio).
    const double weight = tokens.growth > 0.0 ? errors.largest_weight / all.divisor : 0.0;
    growth_ = errors.growth * tokens.growth;
    const double in_double =
        (ratio_error + all.slots * 0x1p-53) * (all.against_public ? 1.0 : 2.0 / all.divisor);
    shared_ = errors.shared(common, weight / std::sqrt(all.least_ratio)) + in_double;
    if (!all.against_public) shared_ += own_ * (mean_norm + common);
    most_ = errors.shared(tokens.most_common, weight / all.least_ratio) +
            errors.spread * tokens.growth + in_double;
    listed_ = 4.0 * kFloatUnit + ratio_error + in_double / moments.reach;
  }

  // log1p(max(A, B)) / (alpha - 1) of order number k. NaN gives +inf: the loss may not be small.
  ADAPMIXED_HD double loss(const ExcessFit (&fits)[2], const ModelSums& sums, std::int64_t k,
                           double order) const {
    const double norm = all_.against_public ? sums.second(moments_.reach) : mean_norm_;
    if (norm == 0.0) return 0.0;
    const double forward = excess(fits[0], sums, sums.listed(k, false), order);
    const double reverse = excess(fits[1], sums, sums.listed(k, true), order);
    if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
    return std::log1p(std::fmax(std::fmax(forward, reverse), 0.0)) / (order - 1.0);
  }

 private:
  // An upper bound on the sum of excesses of one direction, s = order or 1 - order.
  ADAPMIXED_HD double excess(const ExcessFit& fit, const ModelSums& sums, const ModelSums& listed,
                             double order) const {
    const double u = kFloatUnit, reach = moments_.reach;
    const int degree = moments_.degree;
    const ModelSums moments = sums.moments();
    double slope, unused;
    const double bulk = fit.excess.sum(moments, degree, slope);
    const double squared_slope =
        fit.squared_slope.sum(moments, degree, unused) + fit.squared_slope.error * moments[0];
    const double moved = own_ * (reach * std::sqrt(moments[0])) + shared_ + kLostNorm;
    const double at_zero = order * (order - 1.0);  // |c''| = at_zero (1 + x)^{s - 2}
    const double curvature = at_zero * std::exp(-(order + 1.0) * std::log1p(-reach));
    const double size = 1.001 * (at_zero * reach * sums[2] + fit.bend * moments[0]);  // of c'
    const double error =
        own_ * std::fabs(slope) +
        std::fmin(shared_ * std::sqrt(std::fmax(squared_slope, 0.0)), most_ * size) +
        growth_ * std::fabs(slope - bulk) +
        fit.excess.rounding(moments, degree, (6.0 + kMomentAdditions) * u, u) +
        fit.excess.error * moments[0] + 0.5 * curvature * moved * moved;
    return bulk + error + listed[0] + listed[1] * listed_ + listed[2];
  }

  const Neighbours& all_;
  MomentChoice moments_;
  double mean_norm_, own_, shared_, most_, growth_, listed_;
};

ADAPMIXED_CORE_END
