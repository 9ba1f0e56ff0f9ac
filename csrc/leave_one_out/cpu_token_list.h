// Tokens of one model whose excess is summed one by one in double, not by moments.
#pragma once

#include "leave_one_out/cpu_plan.h"

ADAPMIXED_CORE_BEGIN

struct TokenList {
  double *xs, *ps;  // p'/p - 1 and p, with room for one more vector
  double* means;    // of delta, for tokens whose x is computed from it and log r
  std::int64_t count = 0;

  void add(double x, double p) {
    xs[count] = x;
    ps[count++] = p;
  }
  void add_ratio(double log_ratio, double mean, double p) {
    xs[count] = log_ratio;
    means[count] = mean;
    ps[count++] = p;
  }

  // Computes x from the log r and the means that were added.
  void set_excess(const LossPlan& plan, double weight) const {
    for (int k = 0; k < Vec::kLanes; ++k) xs[count + k] = means[count + k] = 0.0;
    for (std::int64_t j = 0; j < count; j += Vec::kLanes) {
      const Vec delta = Vec(weight) * ratio(Vec::load(xs + j)).d;
      plan.excess(delta, Vec::load(means + j)).store(xs + j);
    }
  }

  // rough: the mean over the models in these x was computed in floats.
  void add_to(const LossPlan& plan, bool rough, const ModelSums& sums) const {
    for (int k = 0; k < Vec::kLanes; ++k) xs[count + k] = ps[count + k] = 0.0;
    Vec first(0.0), second(0.0);
    for (std::int64_t j = 0; j < count; j += Vec::kLanes) {
      const Vec x = Vec::load(xs + j), px = Vec::load(ps + j) * x;
      first = first + px;
      second = vfma(px, x, second);
    }
    sums.first() += sum(first);
    sums.listed_second() += sum(second);
    for (std::int64_t k = 0; k < plan.options.num_orders; ++k) {
      ListedSums& to = sums.listed(k);
      (rough ? to.rough_slope : to.slope) += plan.integers[k] != 0
                                                 ? add_integer(plan.integers[k], to)
                                                 : add_real(plan.options.orders[k], to);
    }
  }

  // Adds the excesses of (1+x)^n and (1+x)^{1-n}. Returns the sum of the larger of the two slopes,
  // x times the derivative.
  double add_integer(int n, ListedSums& to) const {
    const Vec one(1.0), order(n), less(n - 1.0);
    Vec f(0.0), g(0.0), slope(0.0);
    for (std::int64_t j = 0; j < count; j += Vec::kLanes) {
      const Vec x = Vec::load(xs + j), p = Vec::load(ps + j), X = x + one;
      // (1+x)^{1-n} - 1 - (1-n) x = (1+x) c_n(y), y = -x/(1+x).
      const Vec inverse = one / X, px = p * x;
      const Chain<Vec> up = chain(x, n), down = chain(Vec(0.0) - x * inverse, n);
      f = vfma(p, up.c, f);
      g = vfma(p * X, down.c, g);
      slope = slope + vmax(px * order * ((up.e - x) * inverse), Vec(0.0) - px * less * down.e);
    }
    to.forward += sum(f);
    to.reverse += sum(g);
    return sum(slope);
  }

  double add_real(double order, ListedSums& to) const {
    const Vec one(1.0);
    Vec f(0.0), g(0.0), slope(0.0);
    for (std::int64_t j = 0; j < count; j += Vec::kLanes) {
      const Vec x = Vec::load(xs + j), p = Vec::load(ps + j), X = x + one;
      const LogParts<Vec> l = log_parts(x, X);
      const Power<Vec> up = power(x, l, Vec(order)), down = power(x, l, Vec(1.0 - order));
      f = vfma(p, up.excess, f);
      g = vfma(p, down.excess, g);
      const Vec px = p * x, inverse = one / X;
      slope = slope + vmax(px * Vec(order) * (up.value * inverse - one),
                           px * Vec(1.0 - order) * (down.value * inverse - one));
    }
    to.forward += sum(f);
    to.reverse += sum(g);
    return sum(slope);
  }
};

ADAPMIXED_CORE_END
