// Noisy screening of every position on the public top-k tokens.
#include "common/operators.h"
#include "common/parallel.h"
#include "screen/formula.h"

ADAPMIXED_CORE_BEGIN
namespace {

double screen_one(const Ensemble& in, const ScreenOptions& options, std::int64_t position) {
  const Screening at{in, options, position};
  double* log_ratios = options.log_ratios + at.kept(0);
  double s_total = 0.0, q_total = 0.0, total = 0.0;
  for (std::int64_t j = 0; j < options.top_k; ++j) {
    const double log_q = at.log_q(j), q = std::exp(log_q);
    double sums[3] = {0.0, 0.0, 0.0};
    for (std::int64_t i = 0; i < in.shape.models; ++i) at.add(i, j, q, sums);
    log_ratios[j] = at.log_ratio(j, log_q, sums);
    s_total += std::exp(log_q + log_ratios[j]);
    q_total += q;
  }
  const double scale = Screening::log_scale(s_total, q_total), log_q_total = std::log(q_total);
  for (std::int64_t j = 0; j < options.top_k; ++j) {
    total += at.excess(log_ratios[j] - scale, at.log_q(j) - log_q_total);
  }
  return at.divergence(total);
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
