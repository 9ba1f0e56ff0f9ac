// One row's two constraints in double: over the whole vocabulary, or over a short list of tokens.
#pragma once

#include "common/rows.h"
#include "project/cpu_public_row.h"
#include "project/row_terms.h"

ADAPMIXED_CORE_BEGIN

class ExactRow {
 public:
  explicit ExactRow(double order) : order_(order), integer_(integer_order(order)) {}

  static std::int64_t scratch_size(std::int64_t padded, std::int64_t wild) {
    return 2 * padded + 2 * wild;
  }

  // Loads the whole row. Returns false if the public row masks a token that this row does not: then
  // no lambda > 0 is feasible. Keeps references to `scratch` and `q`.
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
      if (!wild_counts(t, order_)) continue;
      wild_lq_[wild_] = q.logits[v] - q.lse;
      wild_t_[wild_++] = t;
    }
    return !uncovered.any();
  }

  // Loads `count` tokens by log q and t = log r, both padded to whole vectors (log q = -inf).
  // scratch: 3 times the padded count. Keeps references to the arrays.
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

  Point upper(double log_target) const {
    double wild_reach = HUGE_VAL;
    for (std::int64_t k = 0; k < wild_; ++k) {
      if (wild_t_[k] <= 0.0) continue;
      const double reach = wild_log_reach(wild_lq_[k], wild_t_[k], order_, log_target);
      wild_reach = std::fmin(wild_reach, reach);
    }
    return upper_bound(steepest_, wild_reach);
  }

  double second_moment() const { return second_moment_; }

  // Computes the wanted ones of the Sums.
  Sums sums(const Point& x, bool forward, bool reverse, const Target& target) const {
    const double log_target = target.log_target;
    if (target.scaled) {
      return forward && reverse ? evaluate<true, true, true>(x, log_target)
             : forward          ? evaluate<true, false, true>(x, log_target)
                                : evaluate<false, true, true>(x, log_target);
    }
    return forward && reverse ? evaluate<true, true, false>(x, log_target)
           : forward          ? evaluate<true, false, false>(x, log_target)
                              : evaluate<false, true, false>(x, log_target);
  }

 private:
  // Stores d and r of the tokens at k, or (0, 1) if q = 0 there. Returns d.
  Vec set_ratio(std::int64_t k, Vec t) {
    const Ratio<Vec> x = ratio(t);
    const auto present = Vec::load(q_ + k) > Vec(0.0);
    const Vec d = vselect(present, x.d, Vec(0.0));
    d.store(d_ + k);
    vselect(present, x.r, Vec(1.0)).store(r_ + k);
    return d;
  }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums evaluate(const Point& x, double log_target) const {
    Sums s = integer_ != 0 ? by_multiplication<kForward, kReverse, kScaled>(x, log_target)
                           : by_logarithm<kForward, kReverse, kScaled>(x, log_target);
    if (kReverse && !kScaled && integer_ != 0 && overflowed(x, s)) {
      s = by_logarithm<kForward, kReverse, kScaled>(x, log_target);
    }
    s.forward_slope *= order_;
    s.reverse_slope *= 1.0 - order_;
    for (std::int64_t k = 0; k < wild_; ++k) {
      add_wild(x, order_, kScaled, log_target, wild_lq_[k], wild_t_[k], s);
    }
    return s;
  }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_logarithm(const Point& x, double log_target) const {
    const LogarithmTerms<Vec> terms(x, order_, log_target);
    TermSums<Vec> s;
    for (std::int64_t v = 0; v < count_; v += Vec::kLanes) {
      terms.add(kForward, kReverse, kScaled, Vec::load(q_ + v), Vec::load(log_q_ + v),
                Vec::load(d_ + v), Vec::load(r_ + v), s);
    }
    return total(s);
  }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_multiplication(const Point& x, double log_target) const {
    const MultiplicationTerms<Vec> terms(x, order_, integer_, log_target);
    TermSums<Vec> s;
    for (std::int64_t v = 0; v < count_; v += Vec::kLanes) {
      terms.add(kForward, kReverse, kScaled, Vec::load(q_ + v), Vec::load(d_ + v),
                Vec::load(r_ + v), s);
    }
    return total(s);
  }

  static Sums total(const TermSums<Vec>& s) {
    return {sum(s.forward), sum(s.forward_slope), sum(s.reverse), sum(s.reverse_slope)};
  }

  double order_;
  int integer_;  // the order, or 0 if it is not an integer
  std::int64_t count_ = 0;
  const double *q_ = nullptr, *log_q_ = nullptr;
  double *d_ = nullptr, *r_ = nullptr;
  double *wild_lq_ = nullptr, *wild_t_ = nullptr;
  std::int64_t wild_ = 0;
  double second_moment_ = 0.0;
  double steepest_ = 0.0;
};

ADAPMIXED_CORE_END
