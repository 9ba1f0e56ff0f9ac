// Finds the largest weight of one row from its sums (project/row_terms.h), however they are
// computed.
#pragma once

#include <cmath>
#include <limits>

#include "project/formula.h"
#include "project/row_terms.h"

ADAPMIXED_CORE_BEGIN

// log(F / T) or log(G / T), margin included: <= 0 exactly if feasible. inf - inf counts as
// infeasible.
ADAPMIXED_HD double log_gap(double value, const Target& target) {
  if (!std::isfinite(value)) return HUGE_VAL;
  if (target.scaled) return std::log(value) + target.log_margin;
  const double gap = std::log1p(value) - std::log1p(target.excess);
  return value <= target.excess ? std::fmin(gap, 0.0)
                                : std::fmax(gap, std::numeric_limits<double>::min());
}

// If lambda > 1/2, 1 - lambda must be accurate: too much for sums that leave tokens out.
ADAPMIXED_HD bool delicate(const Point& x) { return x.weight > 0.5 && x.complement > 0.0; }

// Searches with sums_at(x, forward, reverse), which computes the wanted ones of the Sums at x.
ADAPMIXED_HD_CALLBACK
template <class SumsAt>
ADAPMIXED_HD Point search(const SumsAt& sums_at, const Target& target, double order, double radius,
                          Point start, Point upper, const Precision& precision) {
  const double base = target.scaled ? 0.0 : 1.0;
  const auto evaluate = [&](const Point& x, bool want_forward, bool want_reverse, Bound& forward,
                            Bound& reverse) {
    if (!want_forward && !want_reverse) return;
    const Sums s = sums_at(x, want_forward, want_reverse);
    if (want_forward) {
      forward = forward_bound(log_gap(s.forward, target), base + s.forward, s.forward_slope, order);
    }
    if (want_reverse) {
      const double gap = log_gap(s.reverse, target);
      const double log_ratio = target.scaled ? gap : std::log(s.reverse / target.excess);
      reverse = reverse_bound(gap, base + s.reverse, s.reverse, log_ratio, s.reverse_slope, order,
                              x.complement);
    }
  };
  return largest_weight(evaluate, radius, start, upper, precision);
}

// Solves a row from sums over all tokens. row: upper(log_target), second_moment() and
// sums(x, forward, reverse, target).
ADAPMIXED_HD_CALLBACK
template <class RowSums>
ADAPMIXED_HD Point solve_whole(const RowSums& row, double order, double radius,
                               double ratio_error) {
  const Target target = make_target(order, radius, ratio_error);
  const auto sums = [&](const Point& x, bool forward, bool reverse) {
    return row.sums(x, forward, reverse, target);
  };
  const Point upper = row.upper(target.log_target);
  Point start = upper;
  if (!target.scaled) {
    if (target.excess <= 0.0) {
      // A ball of radius 0 contains only an exact copy of q.
      const Sums s = sums({1.0, 0.0}, true, true);
      const bool inside = log_gap(s.forward, target) <= 0.0 && log_gap(s.reverse, target) <= 0.0;
      return inside ? Point{1.0, 0.0} : Point{0.0, 1.0};
    }
    // A is about alpha (alpha-1)/2 lambda^2 sum q d^2 for small lambda d.
    const double guess =
        std::sqrt(2.0 * target.excess / (order * (order - 1.0) * row.second_moment()));
    if (guess < 0.7 && guess < upper.weight) start = shifted({0.0, 1.0}, guess);
  }
  return search(sums, target, order, radius, start, upper, Precision{});
}

// Large targets T = e^{(alpha-1) R}: the tokens that are not listed may together add this much to
// F / T or G / T. If that leaves the complement too uncertain, less is allowed, down to the second
// value.
constexpr double kUnlisted = 1e-6, kLeastUnlisted = 1e-11;
constexpr double kComplementError = 1e-6;  // relative, of which unlisted tokens may be the cause

// How much unlisted tokens may add for that. F^{1/alpha} is convex and G^{-1/(alpha-1)} concave,
// and both are 1 at lambda = 0. So near the answer log F rises at least by
// alpha (1 - T^{-1/alpha}) for each unit of lambda, and log G by (alpha-1) (e^R - 1), which is
// more. They are off by twice what is left out.
ADAPMIXED_HD double allowed_unlisted(double order, double radius, bool by_forward,
                                     double complement) {
  const double slope = by_forward ? -order * std::expm1(-(order - 1.0) * radius / order)
                                  : (order - 1.0) * std::expm1(radius);
  return 0.5 * kComplementError * slope * complement;
}

// A token with log q + s log r above this, s = alpha or 1 - alpha, must be listed: q r^s / T is an
// upper bound on its share of the sum, for every lambda.
ADAPMIXED_HD double list_threshold(double log_target, double unlisted, std::int64_t vocab) {
  return log_target + std::log(unlisted / static_cast<double>(vocab));
}

// Solves a row from lists of tokens; returns false if too many tokens matter. lists:
// list(reverse, unlisted) makes the list of F or G and returns false if too many tokens matter;
// row() is the row made from it; exceeds() tells of a reverse list whether one of its tokens alone
// exceeds T at lambda = 1.
//
// F comes first, as few rows then need the list of G, which can be long.
ADAPMIXED_HD_CALLBACK
template <class Lists>
ADAPMIXED_HD bool solve_lists(Lists& lists, double order, double radius, double ratio_error,
                              Point& found) {
  bool reverse = false;
  double unlisted = kUnlisted;
  Point upper{1.0, 0.0};
  for (;;) {
    if (!lists.list(reverse, unlisted)) return false;
    Target target = make_target(order, radius, ratio_error);
    target.log_margin += 2.0 * unlisted;
    if (!reverse) upper = lists.row().upper(target.log_target);
    Point start = upper;
    if (unlisted < kUnlisted) {
      start = found;
    } else if (reverse && lists.exceeds()) {
      // lambda = 1 fails for sure: the search begins where it would propose to go on.
      start = at_complement(0.5 * reverse_free(radius));
    }
    // The sum of the other side stays 0: its constraint holds.
    const auto sums = [&](const Point& x, bool want_forward, bool want_reverse) {
      const bool wanted = reverse ? want_reverse : want_forward;
      return wanted ? lists.row().sums(x, !reverse, reverse, target) : Sums{};
    };
    found = search(sums, target, order, radius, start, upper, Precision{});
    // If F or G limits lambda, the complement must be accurate.
    if (delicate(found) && unlisted > kLeastUnlisted && !(reverse && !below(found, upper))) {
      const double allowed = allowed_unlisted(order, radius, !reverse, found.complement);
      if (unlisted > allowed) {
        // The complement may turn out to be smaller yet.
        unlisted =
            unlisted == kUnlisted ? std::fmax(0.25 * allowed, kLeastUnlisted) : kLeastUnlisted;
        continue;
      }
    }
    if (reverse || found.complement >= reverse_free(radius) * (1.0 + 1e-6)) return true;
    reverse = true;
    unlisted = kUnlisted;
    upper = found;
  }
}

ADAPMIXED_CORE_END
