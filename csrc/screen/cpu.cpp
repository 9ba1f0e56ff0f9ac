// Noisy screening of every position on the public top-k tokens.
#include "screen/formula.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/operators.h"
#include "common/parallel.h"

ADAPMIXED_CORE_BEGIN
namespace {

// The k likeliest tokens of the public row, best first. Ties go to the lower index; masked tokens
// are left out.
std::vector<std::int64_t> top_tokens(const std::vector<double>& logits, std::int64_t k) {
  std::vector<std::int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const auto masked = [&](std::int64_t v) { return logits[v] == -HUGE_VAL; };
  order.erase(std::remove_if(order.begin(), order.end(), masked), order.end());
  const auto better = [&](std::int64_t a, std::int64_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  const std::int64_t count = std::min<std::int64_t>(k, static_cast<std::int64_t>(order.size()));
  std::partial_sort(order.begin(), order.begin() + count, order.end(), better);
  order.resize(count);
  return order;
}

// D_alpha(s || q) over the kept tokens, given t = log(s/q) and l = log q minus that of the first.
double screening_divergence(const double* t, const double* l, std::int64_t count, double order) {
  ScreeningSums sums(order);
  double largest = -HUGE_VAL, s_total = 0.0, q_total = 0.0, top = -HUGE_VAL, total = 0.0;
  for (std::int64_t j = 0; j < count; ++j) largest = std::fmax(largest, l[j] + t[j]);
  if (!sums.set_largest(largest)) return HUGE_VAL;
  for (std::int64_t j = 0; j < count; ++j) {
    s_total += sums.s_part(t[j], l[j]);
    q_total += sums.q_part(l[j]);
  }
  if (!sums.set_totals(s_total, q_total)) return HUGE_VAL;
  for (std::int64_t j = 0; j < count; ++j) top = std::fmax(top, sums.log_term(t[j], l[j]));
  sums.set_top(top);
  for (std::int64_t j = 0; j < count; ++j) total += sums.term(t[j], l[j]);
  return sums.divergence(total);
}

double screen_one(const Ensemble& in, const ScreenOptions& options, std::int64_t position) {
  const Row public_row = row_of(in.public_logits, 0, position);
  std::vector<double> logits(in.shape.vocab);
  for (std::int64_t v = 0; v < in.shape.vocab; ++v) logits[v] = public_row.at(v);
  const std::vector<std::int64_t> top = top_tokens(logits, options.top_k);
  std::vector<std::int64_t> active;
  for (std::int64_t i = 0; i < in.shape.models; ++i) {
    if (screened_active(in, options, i, position)) active.push_back(i);
  }
  const ScreeningMean mean(options, static_cast<std::int64_t>(active.size()));
  const std::int64_t count = static_cast<std::int64_t>(top.size());
  std::vector<double> t(count), l(count);
  for (std::int64_t j = 0; j < count; ++j) {
    const double log_q = logits[top[j]] - in.public_lse[position], q = std::exp(log_q);
    const double noise = options.noise[position * options.top_k + j];
    double sum_p = 0.0, sum_difference = 0.0;
    for (const std::int64_t i : active) {
      const double p = std::exp(screened_log_p(in, i, position, top[j]));
      sum_p += p;
      sum_difference += p - q;
    }
    l[j] = logits[top[j]] - logits[top[0]];
    if (!mean.rare(log_q, sum_p)) {
      t[j] = mean.log_ratio(log_q, sum_p, sum_difference, noise);
      continue;
    }
    double log_sum_p = -HUGE_VAL;
    for (const std::int64_t i : active) {
      log_sum_p = log_add(log_sum_p, screened_log_p(in, i, position, top[j]));
    }
    t[j] = mean.rare_log_ratio(log_q, log_sum_p, noise);
  }
  return screening_divergence(t.data(), l.data(), count, options.order);
}

void screen(const Ensemble& in, const ScreenOptions& options, double* divergence, bool* passed,
            int threads) {
  cpu::parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      divergence[b] = screen_one(in, options, b);
      passed[b] = divergence[b] <= options.threshold;
    }
  });
}

}  // namespace

void add_screen(cpu::Table& table) { table.screen = screen; }

ADAPMIXED_CORE_END
