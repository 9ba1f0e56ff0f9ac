// One row's two constraints in double, summed by a block over the whole vocabulary or over a short
// list of tokens. Every evaluation computes p/q anew from the logits: stored values would be read
// from memory that all blocks share.
#pragma once

#include "common/block.cuh"
#include "project/row_terms.h"

ADAPMIXED_CORE_BEGIN

// q and p/q of a token that is not wild: log q >= kWildLogQ, so t <= -kWildLogQ, and powers of two
// need no care. A smaller r than e^-690 is taken as 0, which is the safe side (see log_parts).
__device__ inline double token_q(double log_q) {
  const ExpParts<double> e = finite_exp_parts(log_q);
  return power_of_two(e.n) * (1.0 + (e.f + e.tail));
}
__device__ inline Ratio<double> token_ratio(double t) {
  constexpr double kMost = 690.0;
  const ExpParts<double> e = finite_exp_parts(vmax(vmin(t, kMost), -kMost));
  const double scale = power_of_two(e.n), rest = e.f + e.tail;
  const bool gone = t < -kMost;
  return {gone ? 0.0 : scale * (1.0 + rest), gone ? -1.0 : vfma(scale, rest, scale - 1.0)};
}

// Tokens: for_each(visit) calls visit(log q, t) for the tokens of this thread; kWild tells whether
// there may be wild ones, and empty() whether the block has none. kScaled: the form of the sums,
// Target::scaled, as a constant. A whole block must call each member together, and all its threads
// get the same result.
template <class Tokens, bool kScaled>
class BlockRow {
 public:
  BlockRow() = default;
  __device__ BlockRow(const Tokens& tokens, double order)
      : tokens_(tokens), order_(order), integer_(integer_order(order)) {}

  // Computes the results of upper() and, in excess form, of second_moment(), and whether there are
  // wild tokens.
  __device__ void survey(double log_target) {
    if (tokens_.empty()) return;
    double moment = 0.0, largest[3] = {0.0, -HUGE_VAL, 0.0};
    tokens_.for_each([&](double log_q, double t) {
      if (log_q >= kWildLogQ) {
        const double d = token_ratio(t).d;
        if constexpr (!kScaled) moment = vfma(token_q(log_q) * d, d, moment);
        largest[0] = vmax(d * inverse_reach(log_q, order_, log_target), largest[0]);
      } else if (Tokens::kWild && log_q > -HUGE_VAL && wild_counts(t, order_)) {
        largest[2] = 1.0;
        if (t > 0.0) {
          largest[1] = vmax(-wild_log_reach(log_q, t, order_, log_target), largest[1]);
        }
      }
    });
    if constexpr (!kScaled) second_moment_ = block_sum(moment);
    if constexpr (Tokens::kWild) {
      block_reduce(largest, Max{});
      steepest_ = largest[0];
      wild_log_reach_ = -largest[1];
      wild_ = largest[2] != 0.0;
    } else {
      steepest_ = block_max(largest[0]);
    }
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
    if (tokens_.empty()) return s;
    if constexpr (kScaled) {  // one side after the other takes fewer registers
      if (forward) s = evaluate(x, true, false, target);
      if (reverse) {
        const Sums back = evaluate(x, false, true, target);
        s.reverse = back.reverse, s.reverse_slope = back.reverse_slope;
      }
    } else {
      s = evaluate(x, forward, reverse, target);
    }
    s.forward_slope *= order_;
    s.reverse_slope *= 1.0 - order_;
    if constexpr (Tokens::kWild) {
      if (wild_) add_wild_tokens(x, target, s);
    }
    return s;
  }

 private:
  // In scaled form either forward or reverse is a constant.
  __device__ Sums evaluate(const Point& x, bool forward, bool reverse, const Target& target) const {
    if (integer_ != 0) {
      const Sums s = by_multiplication(x, forward, reverse, target);
      if (kScaled || !reverse || !overflowed(x, s)) return s;
    }
    return by_logarithm(x, forward, reverse, target);
  }

  __device__ Sums by_logarithm(const Point& x, bool forward, bool reverse,
                               const Target& target) const {
    const LogarithmTerms<double> terms(x, order_, target.log_target);
    return summed(forward, [&](double q, double log_q, const Ratio<double>& p, auto& s) {
      terms.add(forward, reverse, kScaled, q, log_q, p.d, p.r, s);
    });
  }

  __device__ Sums by_multiplication(const Point& x, bool forward, bool reverse,
                                    const Target& target) const {
    const MultiplicationTerms<double> terms(x, order_, integer_, target.log_target);
    return summed(forward, [&](double q, double, const Ratio<double>& p, auto& s) {
      terms.add(forward, reverse, kScaled, q, p.d, p.r, s);
    });
  }

  template <class AddTerms>
  __device__ Sums summed(bool forward, const AddTerms& add) const {
    TermSums<double> s;
    tokens_.for_each([&](double log_q, double t) {
      if (!Tokens::kWild || log_q >= kWildLogQ) add(token_q(log_q), log_q, token_ratio(t), s);
    });
    if constexpr (kScaled) {
      double values[2] = {forward ? s.forward : s.reverse,
                          forward ? s.forward_slope : s.reverse_slope};
      block_sum(values);
      return forward ? Sums{values[0], values[1], 0.0, 0.0} : Sums{0.0, 0.0, values[0], values[1]};
    } else {
      double values[4] = {s.forward, s.forward_slope, s.reverse, s.reverse_slope};
      block_sum(values);
      return {values[0], values[1], values[2], values[3]};
    }
  }

  // Registers are scarce here: one sum after the other, and the rest waits elsewhere.
  __device__ void add_wild_tokens(const Point& x, const Target& target, Sums& s) const {
    __shared__ double done[4];
    if (threadIdx.x == 0) {
      done[0] = s.forward, done[1] = s.forward_slope;
      done[2] = s.reverse, done[3] = s.reverse_slope;
    }
    add_wild_sum(x, target, &Sums::forward, done[0]);
    add_wild_sum(x, target, &Sums::forward_slope, done[1]);
    add_wild_sum(x, target, &Sums::reverse, done[2]);
    add_wild_sum(x, target, &Sums::reverse_slope, done[3]);
    __syncthreads();
    s = {done[0], done[1], done[2], done[3]};
    __syncthreads();
  }

  __device__ void add_wild_sum(const Point& x, const Target& target, double Sums::* which,
                               double& done) const {
    double sum = 0.0;
    tokens_.for_each([&](double log_q, double t) {
      if (log_q >= kWildLogQ || log_q == -HUGE_VAL || !wild_counts(t, order_)) return;
      Sums wild;
      add_wild(x, order_, kScaled, target.log_target, log_q, t, wild);
      sum += wild.*which;
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) done += sum;
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
