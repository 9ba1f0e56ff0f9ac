// One row's two constraints in double, summed by a block over the whole vocabulary or over a short
// list of tokens. Every evaluation computes p/q anew from the logits: stored values would be read
// from memory that all blocks share.
#pragma once

#include "common/block.cuh"
#include "project/row_terms.h"

ADAPMIXED_CORE_BEGIN

// Tokens: for_each(visit) calls visit(log q, t) for the tokens of this thread; kWild tells whether
// there may be wild ones. A whole block must call each member together, and all its threads get the
// same result.
template <class Tokens>
class BlockRow {
 public:
  BlockRow() = default;
  __device__ BlockRow(const Tokens& tokens, double order)
      : tokens_(tokens), order_(order), integer_(integer_order(order)) {}

  // Computes the results of upper() and second_moment(), and whether there are wild tokens.
  __device__ void survey(double log_target) {
    double moment = 0.0, largest[3] = {0.0, -HUGE_VAL, 0.0};
    tokens_.for_each([&](double log_q, double t) {
      if (log_q >= kWildLogQ) {
        const double d = ratio(t).d;
        moment = vfma(exp_(log_q) * d, d, moment);
        largest[0] = vmax(d * inverse_reach(log_q, order_, log_target), largest[0]);
      } else if (Tokens::kWild && log_q > -HUGE_VAL && wild_counts(t)) {
        largest[2] = 1.0;
        if (t > 1.0) {
          largest[1] = vmax(-wild_log_reach(log_q, t, order_, log_target), largest[1]);
        }
      }
    });
    second_moment_ = block_sum(moment);
    block_reduce(largest, Max{});
    steepest_ = largest[0];
    wild_log_reach_ = -largest[1];
    wild_ = largest[2] != 0.0;
  }

  // F >= q_v (1 + lambda d_v)^alpha for each v alone, so every token gives an upper bound on
  // lambda.
  __device__ Point upper(double /* that of survey() */) const {
    return upper_bound(steepest_, wild_log_reach_);
  }

  __device__ double second_moment() const { return second_moment_; }

  // Computes the wanted ones of the Sums.
  __device__ Sums sums(const Point& x, bool forward, bool reverse, const Target& target) const {
    Sums s;
    bool multiply = integer_ != 0;
    if (multiply) {
      s = by_multiplication(x, forward, reverse, target);
      multiply = !(reverse && !target.scaled && overflowed(x, s));
    }
    if (!multiply) s = by_logarithm(x, forward, reverse, target);
    s.forward_slope *= order_;
    s.reverse_slope *= 1.0 - order_;
    if constexpr (Tokens::kWild) {
      if (wild_) add_wild_tokens(x, target, s);
    }
    return s;
  }

 private:
  __device__ Sums by_logarithm(const Point& x, bool forward, bool reverse,
                               const Target& target) const {
    const LogarithmTerms<double> terms(x, order_, target.log_target);
    return summed([&](double q, double log_q, const Ratio<double>& p, TermSums<double>& s) {
      terms.add(forward, reverse, target.scaled, q, log_q, p.d, p.r, s);
    });
  }

  __device__ Sums by_multiplication(const Point& x, bool forward, bool reverse,
                                    const Target& target) const {
    const MultiplicationTerms<double> terms(x, order_, integer_, target.log_target);
    return summed([&](double q, double, const Ratio<double>& p, TermSums<double>& s) {
      terms.add(forward, reverse, target.scaled, q, p.d, p.r, s);
    });
  }

  template <class AddTerms>
  __device__ Sums summed(const AddTerms& add) const {
    TermSums<double> s;
    tokens_.for_each([&](double log_q, double t) {
      if (log_q >= kWildLogQ) add(exp_(log_q), log_q, ratio(t), s);
    });
    return total({s.forward, s.forward_slope, s.reverse, s.reverse_slope});
  }

  __device__ void add_wild_tokens(const Point& x, const Target& target, Sums& s) const {
    Sums wild;
    tokens_.for_each([&](double log_q, double t) {
      if (log_q >= kWildLogQ || log_q == -HUGE_VAL || !wild_counts(t)) return;
      add_wild(x, order_, target.scaled, target.log_target, log_q, t, wild);
    });
    wild = total(wild);
    s.forward += wild.forward;
    s.forward_slope += wild.forward_slope;
    s.reverse += wild.reverse;
    s.reverse_slope += wild.reverse_slope;
  }

  __device__ static Sums total(const Sums& own) {
    double values[4] = {own.forward, own.forward_slope, own.reverse, own.reverse_slope};
    block_sum(values);
    return {values[0], values[1], values[2], values[3]};
  }

  Tokens tokens_;
  double order_;
  int integer_;  // the order, or 0 if it is not an integer
  bool wild_ = false;
  double second_moment_ = 0.0;
  double steepest_ = 0.0;
  double wild_log_reach_ = HUGE_VAL;
};

ADAPMIXED_CORE_END
