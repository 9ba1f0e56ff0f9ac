// D_alpha(P || Q) and D_alpha(Q || P) of pairs of rows, for orders in [1, inf].
#include "renyi/formula.h"

#include "common/operators.h"
#include "common/parallel.h"
#include "common/rows.h"

ADAPMIXED_CORE_BEGIN
namespace {

// A pair of rows.
struct Pair {
  std::int64_t vocab;
  const double* log_p;
  const double* log_q;
  const double* t;
  double p_outside;  // P of the tokens that q lacks
  bool p_alone, q_alone;

  TokenPair<Vec> load(std::int64_t v) const {
    return {Vec::load(log_p + v), Vec::load(log_q + v), Vec::load(t + v)};
  }
};

// sum q ((p/q)^s - 1 - s (p/q - 1)) as a divergence of order `order`; s = order or 1 - order.
double divergence(const Pair& x, double s, double order) {
  Vec largest(-HUGE_VAL);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    largest = vmax(log_term(x.load(v), s), largest);
  }
  const double top = maximum(largest);
  if (top == HUGE_VAL) return HUGE_VAL;
  Vec total(0.0);
  if (top > kLogDomainFrom) {
    for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
      // The same expression as above, so that the largest term minus `top` is exactly 0.
      total = total + exp_(log_term(x.load(v), s) - Vec(top));
    }
    return divergence_of_log(top + std::log(sum(total)), order);
  }
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    total = total + excess_term(x.load(v), s);
  }
  return divergence_of_terms(sum(total), x.p_outside, s, order);
}

double relative_entropy(const Pair& x, bool forward) {
  Vec total(0.0);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    total = total + entropy_term(x.load(v), forward);
  }
  return entropy_of_terms(sum(total), x.p_outside);
}

double largest_log_ratio(const Pair& x, double sign) {
  Vec largest(-HUGE_VAL);
  for (std::int64_t v = 0; v < x.vocab; v += Vec::kLanes) {
    largest = vmax(signed_log_ratio(x.load(v), sign), largest);
  }
  return std::fmax(maximum(largest), 0.0);
}

template <Dtype D>
Pair load_pair(const Row& p_row, const Row& q_row, double p_lse, double q_lse, std::int64_t vocab,
               double* log_p, double* log_q, double* t) {
  Mask only_p = Vec(0.0).is_nan(), only_q = only_p;
  Vec outside(0.0);
  for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
    const Vec zp = load_logits<D>(p_row.data, v, vocab);
    const Vec zq = load_logits<D>(q_row.data, v, vocab);
    const Mask p_here = only_first(zp, zq);
    if (p_here.any()) outside = outside + vselect(p_here, exp_(zp - Vec(p_lse)), Vec(0.0));
    only_p = only_p | p_here;
    only_q = only_q | only_first(zq, zp);
    const TokenPair<Vec> pair = token_pair(zp, zq, p_lse, q_lse);
    pair.log_p.store(log_p + v);
    pair.log_q.store(log_q + v);
    pair.t.store(t + v);
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
