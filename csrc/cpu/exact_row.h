// One row's two constraints in double: over the whole vocabulary, or over a short list of tokens.
#pragma once

#include "core/elementary.h"
#include "core/projection.h"
#include "cpu/public_row.h"
#include "cpu/rows.h"

ADAPMIXED_CORE_BEGIN

struct Sums {
  double forward = 0.0, forward_slope = 0.0;  // A or F/T, and its derivative by lambda
  double reverse = 0.0, reverse_slope = 0.0;
};

class ExactRow {
 public:
  explicit ExactRow(double order) : order_(order), integer_(integer_order(order)) {}

  static std::int64_t scratch_size(std::int64_t padded, std::int64_t wild) {
    return 2 * padded + 2 * wild;
  }

  // The whole row. False when the public row masks a token that this row does not: no lambda > 0 is
  // feasible. `scratch` and `q` are kept.
  template <Dtype D>
  bool load(const PublicRow& q, const Row& private_row, double private_lse, double* scratch) {
    count_ = q.vocab;
    q_ = q.q, log_q_ = q.log_q;
    d_ = scratch, r_ = d_ + q.padded;
    wild_lq_ = r_ + q.padded, wild_t_ = wild_lq_ + q.wild_count;
    const double shift = private_lse - q.lse;
    Vec second(0.0), steepest(0.0);
    Mask uncovered = Vec(0.0).is_nan();
    for (std::int64_t v = 0; v < count_; v += Vec::kLanes) {
      const Vec zi = load_logits<D>(private_row.data, v, count_);
      const Vec z0 = Vec::load(q.logits + v);
      uncovered = uncovered | ((z0 == Vec(-HUGE_VAL)) & (zi > Vec(-HUGE_VAL)));
      const Vec d = set_ratio(v, zi - z0 - Vec(shift));
      second = vfma(Vec::load(q_ + v) * d, d, second);
      steepest = vmax(d * Vec::load(q.inverse_reach + v), steepest);
    }
    second_moment_ = sum(second);
    steepest_ = maximum(steepest);
    wild_ = 0;
    for (std::int64_t k = 0; k < q.wild_count; ++k) {
      const std::int64_t v = q.wild[k];
      const double t = private_row.at(v) - q.logits[v] - shift;
      if (std::fabs(t) <= 1.0) continue;  // q < e^-680 times a bounded excess: nothing
      wild_lq_[wild_] = q.logits[v] - q.lse;
      wild_t_[wild_++] = t;
    }
    return !uncovered.any();
  }

  // `count` tokens by log q and t = log r, both padded to whole vectors (log q = -inf). scratch: 3
  // times the padded count; the arrays given are kept.
  void list(const double* log_q, const double* t, std::int64_t count, double log_target,
            double* scratch) {
    const std::int64_t padded = round_up(count, Vec::kLanes);
    count_ = padded;
    double* q = scratch;
    q_ = q, log_q_ = log_q;
    d_ = q + padded, r_ = d_ + padded;
    wild_ = 0;
    Vec steepest(0.0);
    for (std::int64_t k = 0; k < count_; k += Vec::kLanes) {
      const Vec lq = Vec::load(log_q + k);
      exp_(lq).store(q + k);
      const Vec d = set_ratio(k, Vec::load(t + k));
      steepest = vmax(d * inverse_reach(lq, order_, log_target), steepest);
    }
    steepest_ = maximum(steepest);
  }

  // F >= q_v (1 + lambda d_v)^alpha for each v alone: every token gives an upper bound on lambda.
  Point upper(double log_target) const {
    double weight = steepest_ > 1.0 ? 1.0 / steepest_ : 1.0;
    for (std::int64_t k = 0; k < wild_; ++k) {
      if (wild_t_[k] <= 1.0) continue;
      const double log_reach = (log_target - wild_lq_[k]) / order_;
      weight = std::fmin(weight, std::exp(std::fmin(0.0, log_reach - wild_t_[k] + 1.0)));
    }
    return weight < 1.0 ? shifted({0.0, 1.0}, weight) : Point{1.0, 0.0};
  }

  double second_moment() const { return second_moment_; }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums evaluate(const Point& x, double log_target) const {
    Sums s = integer_ != 0 ? by_multiplication<kForward, kReverse, kScaled>(x, log_target)
                           : by_logarithm<kForward, kReverse, kScaled>(x, log_target);
    // X c_alpha(y) may overflow in c_alpha where X^{1-alpha} does not: only for such an X.
    if (kReverse && !kScaled && integer_ != 0 && x.complement > 0.0 && x.complement < 1e-30 &&
        !std::isfinite(s.reverse + s.reverse_slope)) {
      s = by_logarithm<kForward, kReverse, kScaled>(x, log_target);
    }
    s.forward_slope *= order_;
    s.reverse_slope *= 1.0 - order_;
    add_wild<kScaled>(x, log_target, s);
    return s;
  }

 private:
  // Stores d and r of the tokens at k, (0, 1) where there is none; returns d.
  Vec set_ratio(std::int64_t k, Vec t) {
    const Ratio<Vec> x = ratio(t);
    const auto present = Vec::load(q_ + k) > Vec(0.0);
    const Vec d = vselect(present, x.d, Vec(0.0));
    d.store(d_ + k);
    vselect(present, x.r, Vec(1.0)).store(r_ + k);
    return d;
  }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_logarithm(const Point& x, double log_target) const {
    const Vec weight(x.weight), complement(x.complement), forward_power(order_),
        reverse_power(1.0 - order_), offset(log_target), tiny(std::numeric_limits<double>::min());
    Vec f(0.0), fs(0.0), g(0.0), gs(0.0);
    for (std::int64_t v = 0; v < count_; v += Vec::kLanes) {
      const Vec d = Vec::load(d_ + v);
      const Vec X = vfma(weight, Vec::load(r_ + v), complement);
      const Vec excess_x = weight * d;
      const LogParts<Vec> l = log_parts(excess_x, X);
      const Vec d_over_X = d / vmax(X, tiny);
      if constexpr (kScaled) {
        const Vec lq = Vec::load(log_q_ + v) - offset;
        if constexpr (kForward) {
          const Vec term = exp_(vfma(forward_power, l.log, lq));
          f = f + term;
          fs = vfma(term, d_over_X, fs);
        }
        if constexpr (kReverse) {
          const Vec term = exp_(vfma(reverse_power, l.log, lq));
          g = g + term;
          gs = vfma(term, d_over_X, gs);
        }
      } else {
        const Vec q = Vec::load(q_ + v);
        if constexpr (kForward) {
          const Power<Vec> w = power(excess_x, l, forward_power);
          f = vfma(q, w.excess, f);
          fs = vfma(q, vfma(w.value, d_over_X, Vec(0.0) - d), fs);
        }
        if constexpr (kReverse) {
          const Power<Vec> w = power(excess_x, l, reverse_power);
          g = vfma(q, w.excess, g);
          gs = gs + vfma(q * w.value, d_over_X, Vec(0.0) - q * d);  // q first: d / X is large
        }
      }
    }
    return {sum(f), sum(fs), sum(g), sum(gs)};
  }

  // Integer orders. The reverse side is (1+x) c_alpha(y), y = -x/(1+x). Scaled sums spread T over
  // the factors: a product above the range of double stands for an infeasible point.
  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_multiplication(const Point& x, double log_target) const {
    const Vec weight(x.weight), complement(x.complement), order(order_);
    const Vec forward_scale(std::exp(-log_target / order_));
    const Vec reverse_scale(std::exp(-log_target / (order_ - 1.0)));
    const int k = integer_ - 1;
    Vec f(0.0), fs(0.0), g(0.0), gs(0.0);
    for (std::int64_t v = 0; v < count_; v += Vec::kLanes) {
      const Vec q = Vec::load(q_ + v), d = Vec::load(d_ + v);
      const Vec X = vfma(weight, Vec::load(r_ + v), complement);
      if constexpr (kScaled) {
        if constexpr (kForward) {
          const Vec factor = X * forward_scale;
          const Vec part = q * integer_power(factor, k);
          f = vfma(part, factor, f);
          fs = vfma(part, forward_scale * d, fs);
        }
        if constexpr (kReverse) {
          const Vec inverse = Vec(1.0) / X;
          const Vec term = q * integer_power(inverse * reverse_scale, k);
          g = g + term;
          gs = vfma(term, inverse * d, gs);
        }
      } else {
        const Vec excess_x = weight * d;
        if constexpr (kForward) {
          const Chain<Vec> w = chain(excess_x, k);
          f = vfma(q, vfma(w.e, excess_x, w.c), f);
          fs = vfma(q * d, w.e, fs);
        }
        if constexpr (kReverse) {
          const Vec y = Vec(0.0) - excess_x / X;
          const Chain<Vec> w = chain(y, k);
          const Vec c = vfma(w.e, y, w.c);
          g = vfma(q * X, c, g);
          gs = vfma(q * d, vfma(order, y, c), gs);
        }
      }
    }
    return {sum(f), sum(fs), sum(g), sum(gs)};
  }

  // Tokens with q < e^-680, one by one in the log domain.
  template <bool kScaled>
  void add_wild(const Point& x, double log_target, Sums& s) const {
    const double offset = kScaled ? log_target : 0.0;
    for (std::int64_t k = 0; k < wild_; ++k) {
      const double lq = wild_lq_[k], t = wild_t_[k];
      const double log_r = std::log(x.weight) + t, log_c = std::log(x.complement);
      const double high = vmax(log_r, log_c);
      const double log_X = high == -HUGE_VAL
                               ? -HUGE_VAL
                               : high + std::log(std::exp(log_r - high) + std::exp(log_c - high));
      const double log_d = t > 0.0 ? t : 0.0;  // |d| <= max(r, 1), to far below any rounding
      const double sign = t > 0.0 ? 1.0 : -1.0;
      const double forward = lq + order_ * log_X - offset;
      const double reverse = lq + (1.0 - order_) * log_X - offset;
      // In excess form the linear term of the token goes too; its q itself is below all rounding.
      const double p = kScaled ? 0.0 : std::exp(lq + t);
      s.forward += std::exp(forward) - order_ * x.weight * p;
      s.forward_slope += order_ * (sign * std::exp(forward + log_d - log_X) - p);
      s.reverse += std::exp(reverse) + (order_ - 1.0) * x.weight * p;
      s.reverse_slope -= (order_ - 1.0) * (sign * std::exp(reverse + log_d - log_X) - p);
    }
  }

  double order_;
  int integer_;  // the order, or 0 if it is no integer
  std::int64_t count_ = 0;
  const double *q_ = nullptr, *log_q_ = nullptr;
  double *d_ = nullptr, *r_ = nullptr;
  double *wild_lq_ = nullptr, *wild_t_ = nullptr;
  std::int64_t wild_ = 0;
  double second_moment_ = 0.0;
  double steepest_ = 0.0;
};

ADAPMIXED_CORE_END
