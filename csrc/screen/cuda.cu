// Noisy screening of every position on the public top-k tokens: one block per position.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "screen/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kScreenThreads = 512;

static __global__ void __launch_bounds__(kScreenThreads, 1)
    screen_kernel(Ensemble in, ScreenOptions options, double* divergence, bool* passed) {
  const Screening at{in, options, blockIdx.x};
  double* log_ratios = options.log_ratios + at.kept(0);
  double totals[2] = {0.0, 0.0};  // s, q
  for (std::int64_t j = warp_id(); j < options.top_k; j += warp_count()) {
    const double log_q = at.log_q(j), q = std::exp(log_q);
    double sums[3] = {0.0, 0.0, 0.0};
    for (std::int64_t i = lane_id(); i < in.shape.models; i += kWarp) at.add(i, j, q, sums);
    warp_reduce(sums, Add{});
    if (lane_id() != 0) continue;
    log_ratios[j] = at.log_ratio(j, log_q, sums);
    totals[0] += std::exp(log_q + log_ratios[j]);
    totals[1] += q;
  }
  block_sum(totals);
  const double scale = Screening::log_scale(totals[0], totals[1]);
  const double log_q_total = std::log(totals[1]);
  double total = 0.0;
  for (std::int64_t j = threadIdx.x; j < options.top_k; j += blockDim.x) {
    total += at.excess(log_ratios[j] - scale, at.log_q(j) - log_q_total);
  }
  total = block_sum(total);
  if (threadIdx.x == 0) {
    divergence[at.position] = at.divergence(total);
    passed[at.position] = divergence[at.position] <= options.threshold;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static void screen(const Ensemble& in, const ScreenOptions& options, double* divergence,
                   bool* passed, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch(queue, device::screen_kernel, grid_of(in.shape.positions), dim3(device::kScreenThreads), 0,
         in, options, divergence, passed);
}

void add_screen(Table& table) { table.screen = screen; }

}  // namespace adapmixed::cuda
