// The sums of project/search.h over tokens in single precision, with bounds on their errors.
//
// Errors, in units (kFloatUnit). d is off by kRatioUnits of itself (common/float_ratio.h), x and X
// by their rounding, and chains of multiplications by 4 of x: all this acts as if lambda were off
// by at most kWeightError, and terms grow with lambda. So sums at lambda (1 + kWeightError) are not
// below the exact ones at lambda, but for `SumAt::error`: 3 for q, 16 for the additions, and
//   chains: 5 for products, and 1 for each unit of the order;
//   careful terms: see power_excess (common/float_power.h);
//   powers: 2 |s| + 6 |s log X| of the power; twice what was found in the same way.
// An absolute error of d (kRatioAbsolute) matters where |d| < 1e-3 alone; the sums' second
// derivative carries it into them.
//
// Templates over F: a vector of floats, or some tokens of a GPU's thread.
#pragma once

#include "common/elementary.h"
#include "common/float_power.h"
#include "common/several.h"
#include "project/search.h"

ADAPMIXED_CORE_BEGIN

constexpr double kWeightError = 20.0 * kFloatUnit;

// Less likely tokens are `rare`, and in no sum. They are negligible in F unless p/q exceeds
// e^kRareLogRatio.
constexpr double kRareLogQ = -200.0, kRareLogRatio = 0.05;
// Whether a row is refused because of a rare token.
ADAPMIXED_HD bool refused(double log_p, double log_q) {
  return log_p > kMaskedLog && (!(log_q > kMaskedLog) || log_p > log_q + kRareLogRatio);
}

// A smaller log2(q / T) stands for q = 0.
constexpr float kNoShare = -1e30f;

// How terms are computed.
enum class Terms {
  kChain,    // integer orders: the excess by multiplications
  kCareful,  // any order: the excess keeps its relative accuracy
  kPlain,    // any order: X^s - 1 - s x by subtraction, for targets that are not small
  kScaled,   // X^s q / T
};

// log2 X within 1 unit of itself, X being exact.
template <class F>
ADAPMIXED_HD_INLINE F float_log2(F X) {
  F e, m;
  vsplit(X, e, m);
  const F w = m - F(1.0f);
  F p(0.12583645f);
  p = vfma(p, w, F(-0.20726946f));
  p = vfma(p, w, F(0.21571569f));
  p = vfma(p, w, F(-0.23894487f));
  p = vfma(p, w, F(0.28791624f));
  p = vfma(p, w, F(-0.36070368f));
  p = vfma(p, w, F(0.48091063f));
  p = vfma(p, w, F(-0.72134733f));
  p = vfma(p, w, F(1.4426950f));
  return vfma(p, w, e);
}

// 2^t within 2 units, or 0 below the range; NaN or inf above it.
template <class F>
ADAPMIXED_HD_INLINE F float_exp2(F t) {
  t = vmax(t, F(-127.0f));
  const F shifted = t + F(kFloatShifter);
  const F f = t - (shifted - F(kFloatShifter));
  F p(1.5403511e-4f);
  p = vfma(p, f, F(1.3390736e-3f));
  p = vfma(p, f, F(9.6182376e-3f));
  p = vfma(p, f, F(5.5503573e-2f));
  p = vfma(p, f, F(0.24022649f));
  p = vfma(p, f, F(0.69314718f));
  const F scale = exp2_integer(shifted);
  return vfma(scale * f, p, scale);
}

// Sums of a few products at a time in floats, and of these sums in double.
template <class F>
struct BlockSum {
  static constexpr int kTermsAdded = 1;  // to a float at a time
  decltype(widened(F())) total{0.0};
  F block{0.0f};
  ADAPMIXED_HD_INLINE void add(F a, F b) { block = vfma(a, b, block); }
  ADAPMIXED_HD_INLINE void widen() {
    total = total + widened(block);
    block = F(0.0f);
  }
};
// One sum for all parts.
template <class V, int kWays>
struct BlockSum<Several<V, kWays>> : BlockSum<V> {
  using BlockSum<V>::block;
  static constexpr int kTermsAdded = kWays;
  ADAPMIXED_HD_INLINE void add(const Several<V, kWays>& a, const Several<V, kWays>& b) {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) block = vfma(a.v[k], b.v[k], block);
  }
};
constexpr int kTermsInFloats = 16;

// What a vector of tokens has for both sums.
template <class F>
struct Tokens {
  F mass, x, X, u;  // u = x / X
  F qu, log2;       // q u for excesses, log2 X for powers
  FloatLog<F> log;  // for careful terms
};

constexpr bool powers(Terms terms) { return terms == Terms::kPlain || terms == Terms::kScaled; }

// The sum for s = alpha, or 1 - alpha in reverse, under construction.
template <Terms kTerms, bool kReverse, class F>
class Side {
 public:
  ADAPMIXED_HD explicit Side(double alpha)
      : alpha_(static_cast<float>(alpha)),
        beyond_(static_cast<float>(alpha - 1.0)),
        order_(integer_order(alpha)) {}

  ADAPMIXED_HD_INLINE void add(const Tokens<F>& t) {
    const F s(kReverse ? -beyond_ : alpha_);
    if constexpr (powers(kTerms)) {
      const F w = kTerms == Terms::kScaled ? float_exp2(vfma(s, t.log2, t.mass))
                                           : t.mass * float_exp2(s * t.log2);
      value.add(w, F(1.0f));
      slope.add(w, t.u);
      curvature.add(w * t.u, t.u);
    } else {
      // c = X^s - 1 - s x, which is positive; X^s - X = c + (s - 1) x.
      const F c = kTerms == Terms::kChain ? chained(t) : power_excess(t.x, t.log, s);
      const F more = vfma(F(kReverse ? -alpha_ : beyond_), t.x, c);
      value.add(t.mass, c);
      slope.add(t.qu, more);
      curvature.add(t.qu * t.u, more + t.X);
    }
  }
  ADAPMIXED_HD_INLINE void widen() { value.widen(), slope.widen(), curvature.widen(); }

  // For SumAt, but for factors that all terms share.
  BlockSum<F> value, slope, curvature;

 private:
  ADAPMIXED_HD_INLINE F chained(const Tokens<F>& t) const {
    if constexpr (!kReverse) return chain(t.x, order_).c;
    return t.X * chain(F(0.0f) - t.u, order_).c;
  }
  float alpha_, beyond_;  // alpha, alpha - 1
  int order_;             // alpha, if it is an integer
};

// What the errors of a row's sums depend on.
struct RowRange {
  double low, high;  // of d, 0 included
  double mass;       // the largest |log(q / T)|, or |log q| of sums that are not scaled
};

// One side from its sums over all tokens. reach: the largest |log X| of a term above 1.
template <Terms kTerms>
ADAPMIXED_HD SumAt sum_at(const double (&sums)[3], double s, double reach, const RowRange& range,
                          const ProjectTarget& target) {
  const double size = std::fabs(s), order = target.order;
  SumAt at{sums[0], s * sums[1], s * (s - 1.0) * sums[2]};
  if constexpr (powers(kTerms)) {
    // X^s is off by 2 |s| + 6 |s log X| units, q and the sum by 24. Where X^s <= 1, X^s |s log X|
    // is at most 1/e.
    at.error = (24.0 + 2.0 * size + 6.0 * size * reach) * at.value;
    if constexpr (kTerms == Terms::kScaled) {
      at.error += 3.0 * std::exp(-target.log_target) + 5.0 * range.mass * at.value;
    } else {
      at.error += 3.0;
      at.value -= 1.0;
    }
  } else if constexpr (kTerms == Terms::kCareful) {
    at.error = (200.0 + 40.0 / (order - 1.0) + 4.0 * range.mass) * at.value;
  } else {
    at.error = (24.0 + order) * at.value;
  }
  at.error *= kFloatUnit;
  if (!target.scaled) {
    const double largest = std::fmin(1e-3, std::fmax(range.high, -range.low)) + kRatioAbsolute;
    at.error += largest * kRatioAbsolute * order * (order - 1.0);
  }
  return at;
}

// The sums of a row at one lambda. row.for_each calls visit(q or log2(q / T), d') with
// d = scale d' + offset, for F at a time; row.add_up(sums) adds up the sums of all that take part.
ADAPMIXED_HD_CALLBACK
template <Terms kTerms, bool kForward, bool kReverse, class Row>
ADAPMIXED_HD SumsAt sums_at(const Row& row, const ProjectTarget& target, double weight) {
  using F = typename Row::Float;
  const double raised = weight * (1.0 + kWeightError);
  const F slope(static_cast<float>(raised * row.scale()));
  const F at_zero(static_cast<float>(raised * row.offset())), one(1.0f), least(1e-30f);
  Side<kTerms, false, F> forward(target.order);
  Side<kTerms, true, F> reverse(target.order);
  int terms = 0;
  const auto widen = [&] {
    if constexpr (kForward) forward.widen();
    if constexpr (kReverse) reverse.widen();
    terms = 0;
  };
  row.for_each([&](F mass, F d) ADAPMIXED_INLINE {
    Tokens<F> t;
    t.mass = mass;
    t.x = vfma(d, slope, at_zero);
    t.X = vmax(t.x + one, least);
    t.u = t.x * reciprocal(t.X);
    if constexpr (!powers(kTerms)) t.qu = t.mass * t.u;
    if constexpr (powers(kTerms)) t.log2 = float_log2(t.X);
    if constexpr (kTerms == Terms::kCareful) t.log = float_log(t.x, t.X);
    if constexpr (kForward) forward.add(t);
    if constexpr (kReverse) reverse.add(t);
    terms += BlockSum<F>::kTermsAdded;
    if (terms >= kTermsInFloats) widen();
  });
  widen();
  double sums[6] = {sum(forward.value.total),     sum(forward.slope.total),
                    sum(forward.curvature.total), sum(reverse.value.total),
                    sum(reverse.slope.total),     sum(reverse.curvature.total)};
  row.add_up(sums);
  const RowRange range = row.range();
  const double lost = -weight * (1.0 + 2.0 * kWeightError) * range.low;
  SumsAt at;
  at.least_u = lost < 1.0 ? -lost / (1.0 - lost) : -HUGE_VAL;
  if constexpr (kForward) {
    const double own[3] = {sums[0], sums[1], sums[2]};
    at.forward = sum_at<kTerms>(own, target.order, std::log1p(raised * range.high), range, target);
  }
  if constexpr (kReverse) {
    const double own[3] = {sums[3], sums[4], sums[5]};
    at.reverse = sum_at<kTerms>(own, 1.0 - target.order, -std::log1p(-lost), range, target);
    if (!(lost < 1.0)) at.reverse.value = HUGE_VAL;  // X may be 0
  }
  return at;
}

ADAPMIXED_HD_CALLBACK
template <Terms kTerms, class Row>
ADAPMIXED_HD double search_row(const Row& row, const ProjectTarget& target, Sides sides,
                               double start, double most) {
  if (!(row.range().high < 1e37)) return 0.0;  // p/q leaves the range of floats
  const auto sums = [&](double weight, bool forward, bool reverse) {
    return forward && reverse ? sums_at<kTerms, true, true>(row, target, weight)
           : forward          ? sums_at<kTerms, true, false>(row, target, weight)
                              : sums_at<kTerms, false, true>(row, target, weight);
  };
  return largest_weight(sums, target, sides, start, most);
}

// The weight of a row. row.select(s, most) chooses the tokens that can matter for X^s / T and a
// lambda up to `most`; row.load() takes all and returns moments of d.
ADAPMIXED_HD_CALLBACK
template <bool kScaled, class Row>
ADAPMIXED_HD double solve_row(Row& row, const ProjectTarget& target) {
  if constexpr (kScaled) {
    // F comes first: it often leaves nothing to do for G, of which more tokens matter.
    row.select(target.order, 1.0);
    const double found = search_row<Terms::kScaled>(row, target, Sides::kForward, 1.0, 1.0);
    if (!(found > reverse_free(target.radius))) return found;
    row.select(1.0 - target.order, found);
    return search_row<Terms::kScaled>(row, target, Sides::kReverse, found, found);
  } else {
    const Moments moments = row.load();
    const double start = first_weight(moments, target);
    if (integer_order(target.order) != 0) {
      return search_row<Terms::kChain>(row, target, Sides::kBoth, start, 1.0);
    }
    // Powers would be off by too large a part of a small target.
    const double reach = std::log1p(start * row.range().high);
    const double error = (24.0 + target.order * (2.0 + 6.0 * reach)) * kFloatUnit;
    return error * (1.0 + target.limit) > 1e-4 * target.limit
               ? search_row<Terms::kCareful>(row, target, Sides::kBoth, start, 1.0)
               : search_row<Terms::kPlain>(row, target, Sides::kBoth, start, 1.0);
  }
}

ADAPMIXED_CORE_END
