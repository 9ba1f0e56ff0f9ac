// Algorithm 1, lines 1-8: is a slightly mixed and noised distribution still close to the public one
// on the public top-k tokens? The order of the steps is the paper's (noise, then re-scaling).
//
// With the weight lambda, A active rows and n slots, s = mean of lambda p_i + (1 - lambda) q is
//   q + (lambda/n) sum (p_i - q) = ((n - A) + (1 - lambda) A)/n q + (lambda/n) sum p_i.
// The first form is exact if s is near q, and cancels if s is far below q; the second adds
// nonnegative numbers. A token is represented by log(s/q), which is small if s is close to q, and
// stays in range if q does not.
#pragma once

#include <cmath>

#include "common/config.h"
#include "common/elementary.h"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

// Scores s below this count as 0, so that no score has lost digits at the end of double's range.
constexpr double kLeastScore = 1e-290;
// Divergences below this count as 0. Rounding leaves less where they are 0: log(s/q) of a single
// token, once re-scaled, is within 2e-13 of 0, which is a divergence of alpha/2 4e-26.
constexpr double kLeastDivergence = 1e-20;

// One position; j numbers its top-k tokens.
struct Screening {
  const Ensemble& in;
  const ScreenOptions& options;
  std::int64_t position;

  ADAPMIXED_HD std::int64_t kept(std::int64_t j) const { return position * options.top_k + j; }
  ADAPMIXED_HD double log_q(std::int64_t j) const {
    return row_of(in.public_logits, 0, position).at(options.tokens[kept(j)]) -
           in.public_lse[position];
  }

  // Adds p, p - q and 1 of a row to the sums over the active rows.
  ADAPMIXED_HD void add(std::int64_t model, std::int64_t j, double q, double (&sums)[3]) const {
    const std::int64_t row = model * in.shape.positions + position;
    if (options.active != nullptr && !options.active[row]) return;
    const double z = row_of(in.private_logits, model, position).at(options.tokens[kept(j)]);
    const double p = std::exp(z - in.private_lse[row]);
    sums[0] += p;
    sums[1] += p - q;
    sums[2] += 1.0;
  }

  // log(s/q) with noise. It is -inf for a token without a score, or one that the public row masks,
  // and NaN if a row is not a distribution.
  ADAPMIXED_HD double log_ratio(std::int64_t j, double log_q, const double (&sums)[3]) const {
    const double slots = static_cast<double>(options.num_models), share = options.weight / slots;
    const double rest = ((slots - sums[2]) + (1.0 - options.weight) * sums[2]) / slots;
    const double q = std::exp(log_q), noise = options.noise[kept(j)];
    const double moved = share * sums[1] + noise, s = rest * q + share * sums[0] + noise;
    if (s < kLeastScore || log_q == -HUGE_VAL) return -HUGE_VAL;
    return std::fabs(moved) < 0.5 * q ? std::log1p(moved / q) : std::log(s) - log_q;
  }

  // The logarithm of the factor that re-scaling takes from s/q; NaN if nothing is left of s.
  ADAPMIXED_HD static double log_scale(double s_total, double q_total) {
    const double found = std::log(s_total / q_total);
    return std::fabs(found) < HUGE_VAL ? found : NAN;
  }

  // q ((s/q)^alpha - 1 - alpha (s/q - 1)) after re-scaling. Near alpha = 1 the rounding of the
  // plain sum exceeds its distance from 1. Both rows sum to 1, so that the linear part of every
  // term can be left out.
  ADAPMIXED_HD double excess(double log_ratio, double log_q) const {
    const double q = std::exp(log_q), order = options.order, eta = order - 1.0;
    const double u = eta * log_ratio;
    if (std::fabs(log_ratio) < 0.2 && std::fabs(u) < 1.0) {  // else the power might overflow
      const double x = std::expm1(log_ratio);
      return q * power(x, log_parts(x, 1.0 + x), order).excess;
    }
    // (s (s/q)^eta - s) - eta (s - q): if eta is small, all terms are of its size.
    const double s = std::exp(log_q + log_ratio);
    return (u < 1.0 ? s * std::expm1(u) : std::exp(log_q + order * log_ratio) - s) - eta * (s - q);
  }

  // From the sum of excess.
  ADAPMIXED_HD double divergence(double total) const {
    if (std::isnan(total)) return HUGE_VAL;
    const double found = std::log1p(std::fmax(total, 0.0)) / (options.order - 1.0);
    return found < kLeastDivergence ? 0.0 : found;
  }
};

ADAPMIXED_CORE_END
