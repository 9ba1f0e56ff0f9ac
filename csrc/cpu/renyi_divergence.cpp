// D_alpha(P || Q) and D_alpha(Q || P) of pairs of rows, for orders in [1, inf].
#include "core/renyi.h"

#include "core/elementary.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

// log p, log q and t = log p/q of a row pair; a token that q lacks is (-inf, -inf, 0): no term
// anywhere. log p is kept apart since log q + t cancels where q is far below double.
struct Pair {
  std::int64_t vocab;
  const double* log_p;
  const double* log_q;
  const double* t;
  double p_outside;  // P of the tokens that q lacks: what sum q (p/q - 1) = 0 then misses
  bool p_alone, q_alone;
};

// sum q ((p/q)^s - 1 - s (p/q - 1)) as a divergence of order `order`; s = order or 1 - order.
double divergence(const Pair& x, double s, double order) {
  Vec largest(-HUGE_VAL);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    largest = vmax(vfma(Vec(s), Vec::load(x.t + v), Vec::load(x.log_q + v)), largest);
  }
  const double top = maximum(largest);
  if (top == HUGE_VAL) return HUGE_VAL;
  if (top > kLogDomainFrom) {
    Vec total(0.0);
    for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
      // The same expression as above: `top` minus itself is 0 however large both are.
      const Vec term = vfma(Vec(s), Vec::load(x.t + v), Vec::load(x.log_q + v));
      total = total + exp_(term - Vec(top));
    }
    return divergence_of_log(top + std::log(sum(total)), order);
  }
  Vec total(0.0);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    const Vec t = Vec::load(x.t + v), lq = Vec::load(x.log_q + v);
    const Vec q = exp_(lq), p = exp_(Vec::load(x.log_p + v));
    const Ratio<Vec> r = ratio(t);
    const Power<Vec> w = power(r.d, log_parts(r.d, r.r), Vec(s));
    // Away from p = q nothing cancels, and the powers of r alone could overflow.
    const Vec apart = exp_(vfma(Vec(s), t, lq)) - q - Vec(s) * (p - q);
    total = total + vselect(vabs(t) < Vec(0.2), q * w.excess, apart);
  }
  return divergence_of_excess(sum(total) - s * x.p_outside, order);
}

// KL(P || Q) = sum p h(-t), KL(Q || P) = sum q h(t), h(u) = e^u - 1 - u >= 0 term by term.
double relative_entropy(const Pair& x, bool forward) {
  const double sign = forward ? -1.0 : 1.0;
  Vec total(0.0);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    const Vec t = Vec::load(x.t + v), lq = Vec::load(x.log_q + v);
    const Vec q = exp_(lq), p = exp_(Vec::load(x.log_p + v)), u = Vec(sign) * t;
    const Vec base = forward ? p : q;
    const Vec other = forward ? q : p;
    const ExpParts<Vec> e = exp_parts(u);
    const Vec near = base * e.tail;
    const Vec apart = other - base - base * u;
    const Vec term = vselect(e.n == Vec(0.0), near, apart);
    // base = 0 contributes `other` alone, also where u is infinite.
    total = total + vselect(base > Vec(0.0), term, other);
  }
  return std::fmax(sum(total) + x.p_outside, 0.0);
}

double largest_log_ratio(const Pair& x, double sign) {
  Vec largest(-HUGE_VAL);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    const auto present = Vec::load(x.log_q + v) > Vec(-HUGE_VAL);
    const Vec t = Vec(sign) * Vec::load(x.t + v);
    largest = vmax(vselect(present, t, Vec(-HUGE_VAL)), largest);
  }
  return std::fmax(maximum(largest), 0.0);
}

template <Dtype D>
Pair load_pair(const Row& p_row, const Row& q_row, double p_lse, double q_lse, std::int64_t vocab,
               double* log_p, double* log_q, double* t) {
  const Vec none(-HUGE_VAL);
  Mask only_p = Vec(0.0).is_nan(), only_q = only_p;
  Vec outside(0.0);
  for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
    const Vec zp = load_logits<D>(p_row.data, v, vocab);
    const Vec zq = load_logits<D>(q_row.data, v, vocab);
    const auto has_p = zp > none, has_q = zq > none;
    const auto p_here = has_p & (zq == none);
    if (p_here.any()) outside = outside + vselect(p_here, exp_(zp - Vec(p_lse)), Vec(0.0));
    only_p = only_p | p_here;
    only_q = only_q | (has_q & (zp == none));
    vselect(has_q, zp - Vec(p_lse), none).store(log_p + v);
    vselect(has_q, zq - Vec(q_lse), none).store(log_q + v);
    const Vec both = zp - zq - Vec(p_lse - q_lse);
    vselect(has_p & has_q, both, vselect(has_q, none, Vec(0.0))).store(t + v);
  }
  return {vocab, log_p, log_q, t, sum(outside), only_p.any(), only_q.any()};
}

void one_pair(const Pair& x, double order, double& forward, double& reverse) {
  if (order == HUGE_VAL) {
    forward = x.p_alone ? HUGE_VAL : largest_log_ratio(x, 1.0);
    reverse = x.q_alone ? HUGE_VAL : largest_log_ratio(x, -1.0);
  } else if (order == 1.0) {
    forward = x.p_alone ? HUGE_VAL : relative_entropy(x, true);
    reverse = x.q_alone ? HUGE_VAL : relative_entropy(x, false);
  } else {
    forward = x.p_alone ? HUGE_VAL : divergence(x, order, order);
    reverse = x.q_alone ? HUGE_VAL : divergence(x, 1.0 - order, order);
  }
}

void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                      double* forward, double* backward, int threads) {
  const std::int64_t vocab = in.shape.vocab, padded = round_up(vocab, 8);
  cpu::parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    double* memory = cpu::thread_scratch(3 * padded);
    for (std::int64_t k = begin; k < end; ++k) {
      const Row p = row_of(in.private_logits, 0, k), q = row_of(in.public_logits, 0, k);
      Pair pair{};
      with_dtype(p.dtype, [&](auto tag) {
        pair = load_pair<decltype(tag)::value>(p, q, in.private_lse[k], in.public_lse[k], vocab,
                                               memory, memory + padded, memory + 2 * padded);
      });
      for (std::int64_t j = 0; j < num_orders; ++j) {
        const std::int64_t at = k * num_orders + j;
        one_pair(pair, orders[j], forward[at], backward[at]);
      }
    }
  });
}

}  // namespace

void add_renyi_divergence(cpu::Table& table) { table.renyi_divergence = renyi_divergence; }

ADAPMIXED_CORE_END
