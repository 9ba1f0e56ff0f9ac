// Noisy screening of every position on the public top-k tokens.
#include "core/screening.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/view.h"
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

double screen_one(const Ensemble& in, const ScreenOptions& options, std::int64_t position) {
  const std::int64_t models = in.shape.models, positions = in.shape.positions;
  const Row public_row = row_of(in.public_logits, 0, position);
  std::vector<double> logits(in.shape.vocab);
  for (std::int64_t v = 0; v < in.shape.vocab; ++v) logits[v] = public_row.at(v);
  const std::vector<std::int64_t> top = top_tokens(logits, options.top_k);
  const std::int64_t count = static_cast<std::int64_t>(top.size());
  std::vector<double> log_q(count), s(count);
  for (std::int64_t j = 0; j < count; ++j) log_q[j] = logits[top[j]] - in.public_lse[position];
  const double share = options.weight / static_cast<double>(options.num_models);
  for (std::int64_t j = 0; j < count; ++j) {
    const double q = std::exp(log_q[j]);
    double difference = 0.0;  // sum over the active models of p_i - q
    for (std::int64_t i = 0; i < models; ++i) {
      const std::int64_t at = i * positions + position;
      if (options.active != nullptr && !options.active[at]) continue;
      const double z = row_of(in.private_logits, i, position).at(top[j]);
      difference += std::exp(z - in.private_lse[at]) - q;
    }
    s[j] = q + share * difference + options.noise[position * options.top_k + j];
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
