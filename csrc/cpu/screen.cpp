// Noisy screening of every position on the public top-k tokens.
#include "core/screening.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/parallel.h"

namespace adapmixed {
namespace ADAPMIXED_ISA {
namespace {

// The k likeliest tokens of the public row, best first, ties by lower index, masked ones left out.
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

// D_alpha(s || q) of the tokens kept; s[j] is made nonnegative.
double screening_divergence(double* s, const double* log_q, std::int64_t count, double order) {
  ScreeningSums sums(order);
  double s_total = 0.0, q_total = 0.0;
  for (std::int64_t j = 0; j < count; ++j) {
    s[j] = ScreeningSums::nonnegative(s[j]);
    s_total += s[j];
    q_total += std::exp(log_q[j]);
  }
  if (!sums.set_totals(s_total, q_total)) return HUGE_VAL;
  double top = -HUGE_VAL;
  for (std::int64_t j = 0; j < count; ++j) top = std::fmax(top, sums.log_term(s[j], log_q[j]));
  sums.set_top(top);
  double total = 0.0;
  for (std::int64_t j = 0; j < count; ++j) total += sums.term(s[j], log_q[j]);
  return sums.divergence(total);
}

double screen_one(const Ensemble& in, const ScreenOptions& options, std::int64_t position) {
  const Row public_row = row_of(in.public_logits, 0, position);
  std::vector<double> logits(in.shape.vocab);
  for (std::int64_t v = 0; v < in.shape.vocab; ++v) logits[v] = public_row.at(v);
  const std::vector<std::int64_t> top = top_tokens(logits, options.top_k);
  const std::int64_t count = static_cast<std::int64_t>(top.size());
  std::vector<double> log_q(count), s(count);
  for (std::int64_t j = 0; j < count; ++j) {
    log_q[j] = logits[top[j]] - in.public_lse[position];
    const double q = std::exp(log_q[j]);
    double difference = 0.0;
    for (std::int64_t i = 0; i < in.shape.models; ++i) {
      difference += screened_difference(in, options, i, position, top[j], q);
    }
    s[j] = screened(options, q, difference, options.noise[position * options.top_k + j]);
  }
  return screening_divergence(s.data(), log_q.data(), count, options.order);
}

}  // namespace
}  // namespace ADAPMIXED_ISA

namespace cpu {

void screen(const Ensemble& in, const ScreenOptions& options, double* divergence, bool* passed,
            int threads) {
  parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      divergence[b] = ADAPMIXED_ISA::screen_one(in, options, b);
      passed[b] = divergence[b] <= options.threshold;
    }
  });
}

}  // namespace cpu
}  // namespace adapmixed
