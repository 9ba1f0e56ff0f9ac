// p(v) ~ q(v) exp((kappa/N) sum_i u_i(v)), u_i(v) = clip(log p_i(v) - log q(v), a, b).
// log_pool/formula.h has the derivation and the rounding.
//
// One block per row finds its log-sum-exp and span. One thread per token adds up all models there.
// One block per position sums the weights. Sums of u_i are exact, the extremes of a span do not
// depend on their order, and the weights are added in a fixed order.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/log_sum_exp.cuh"
#include "log_pool/formula.h"
#include "mixture/cuda_check.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kPoolThreads = 256;

// max u_i - min u_i of one row. A whole block must call this together.
template <Dtype D>
__device__ double row_span(const PoolGrid& grid, const typename Bits<D>::type* row,
                           const typename Bits<D>::type* public_row, std::int64_t vocab,
                           double origin) {
  double extremes[2] = {-HUGE_VAL, -HUGE_VAL};  // of the positions, and of their negatives
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z) {
    const double z0 = logit<D>(public_row, v);
    if (z0 == -HUGE_VAL) return;
    const double x = grid.position(z - z0, origin);
    extremes[0] = vmax(x, extremes[0]);
    extremes[1] = vmax(-x, extremes[1]);
  });
  block_reduce(extremes, Max{});
  return grid.span(-extremes[1], extremes[0]);
}

template <Dtype D>
__global__ void pool_row_kernel(const __grid_constant__ LogPoolInputs in, PoolGrid grid,
                                const __grid_constant__ LogPoolResults out) {
  const std::int64_t at = blockIdx.x, position = at % in.shape.positions;
  const auto* row = row_bits<D>(in.private_logits, at / in.shape.positions, position);
  const RowSum sum = row_sum<D>(row, in.shape.vocab);
  const double public_lse = out.public_lse[position];
  const bool public_ok = std::isfinite(public_lse);
  double span = NAN;
  if (sum.status == kRowOk && public_ok) {
    span = row_span<D>(grid, row, row_bits<D>(in.public_logits, 0, position), in.shape.vocab,
                       grid.origin(sum.lse, public_lse));
  }
  if (threadIdx.x != 0) return;
  out.span[at] = span;
  out.private_lse[at] = sum.lse;
  out.status[at] = public_ok ? sum.status : kRowPublic;
}

// sum_i u_i at one token with the public logit z0. NaN if an active row has no log-sum-exp, or
// holds a NaN or +inf here.
template <Dtype D>
__device__ double summed_log_ratio(const PoolGrid& grid, const Ensemble& in,
                                   const LogPoolOptions& options, std::int64_t position,
                                   std::int64_t v, double z0) {
  const double public_lse = in.public_lse[position];
  double sum = std::isfinite(public_lse) && z0 < HUGE_VAL ? 0.0 : NAN;
  if (z0 == -HUGE_VAL) return sum;
#pragma unroll 4
  for (std::int64_t i = 0; i < in.shape.models; ++i) {
    const std::int64_t at = i * in.shape.positions + position;
    if (!takes_part(options, at)) continue;
    const double private_lse = in.private_lse[at];
    const double z = logit<D>(row_bits<D>(in.private_logits, i, position), v);
    const double x = grid.clipped(grid.position(z - z0, grid.origin(private_lse, public_lse)));
    const bool good = std::fabs(private_lse) < HUGE_VAL && z < HUGE_VAL;
    sum += good ? grid.nats(x) : NAN;
  }
  return sum;
}

// One thread per token; blocks_a_row blocks per position.
template <Dtype D>
__global__ void pool_sum_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                const __grid_constant__ LogPoolOptions options,
                                std::int64_t blocks_a_row, double* sums) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  if (v >= in.shape.vocab) return;
  const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
  sums[position * in.shape.vocab + v] = summed_log_ratio<D>(grid, in, options, position, v, z0);
}

// log sum_v q exp(share sum_i u_i); NaN if a term is NaN.
template <Dtype D>
__global__ void pool_normaliser_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                       const double* sums, double* log_normaliser) {
  const std::int64_t position = blockIdx.x, vocab = in.shape.vocab;
  const auto* row = row_bits<D>(in.public_logits, 0, position);
  const double* sum = sums + position * vocab;
  const double lse = in.public_lse[position];
  double found[2] = {-HUGE_VAL, 0.0};  // the largest term, and 1 if there is a NaN
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z0) {
    const double e = grid.log_weight(sum[v], z0 - lse);
    found[0] = vmax(e, found[0]);
    if (e != e) found[1] = 1.0;
  });
  block_reduce(found, Max{});
  double total = 0.0;
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z0) {
    total += exp_(grid.log_weight(sum[v], z0 - lse) - found[0]);
  });
  total = block_sum(total);
  if (threadIdx.x == 0) {
    log_normaliser[position] = found[1] == 0.0 ? found[0] + std::log(total) : NAN;
  }
}

template <Dtype D>
__global__ void pool_mixture_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                    const __grid_constant__ LogPoolOptions options,
                                    const double* log_normaliser, std::int64_t blocks_a_row,
                                    double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row, vocab = in.shape.vocab;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  if (v >= vocab) return;
  const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
  const double sum = summed_log_ratio<D>(grid, in, options, position, v, z0);
  const double log_p =
      grid.log_weight(sum, z0 - in.public_lse[position]) - log_normaliser[position];
  probabilities[position * vocab + v] = log_p == log_p ? exp_(log_p) : NAN;
}

// Single log-probabilities: one warp per position, whose lanes share the models.
static __global__ void pool_log_prob_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                            const __grid_constant__ LogPoolOptions options,
                                            const double* log_normaliser,
                                            const std::int64_t* targets, double* result) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kLogProbWarps + warp_id();
  if (b >= in.shape.positions) return;  // true for the whole warp
  const std::int64_t v = targets[b];
  const bool inside = v >= 0 && v < in.shape.vocab;
  const double z0 = inside ? row_of(in.public_logits, 0, b).at(v) : NAN;
  double sum[1] = {0.0};
  if (z0 > -HUGE_VAL) {
    for (std::int64_t i = lane_id(); i < in.shape.models; i += kWarp) {
      const std::int64_t at = i * in.shape.positions + b;
      if (!takes_part(options, at)) continue;
      const bool good = std::fabs(in.private_lse[at]) < HUGE_VAL;
      sum[0] += good ? pooled_log_ratio(grid, in, i, b, v, z0) : NAN;
    }
  }
  warp_reduce(sum, Add{});
  if (lane_id() != 0) return;
  const double found = grid.log_weight(sum[0], z0 - in.public_lse[b]) - log_normaliser[b];
  result[b] = found <= kMostLogProb ? found : NAN;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

std::int64_t blocks_a_row(const Shape& shape) {
  return (shape.vocab + device::kPoolThreads - 1) / device::kPoolThreads;
}

}  // namespace

// The workspace holds the sums over the models.
std::int64_t log_pool_workspace(const Shape& shape) {
  return shape.positions * shape.vocab * static_cast<std::int64_t>(sizeof(double));
}

void log_pool(const LogPoolInputs& in, const LogPoolOptions& options, const LogPoolResults& out,
              const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::PoolGrid grid(options);
  const dim3 threads(device::kPoolThreads);
  log_sum_exp(in.public_logits, 1, shape.positions, shape.vocab, out.public_lse, out.public_status,
              queue);
  const Ensemble ensemble{shape, in.private_logits, in.public_logits, out.private_lse,
                          out.public_lse};
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    launch(queue, device::pool_row_kernel<kDtype>, grid_of(shape.models * shape.positions), threads,
           0, in, grid, out);
    auto* sums = static_cast<double*>(queue.workspace);
    const std::int64_t blocks = blocks_a_row(shape);
    launch(queue, device::pool_sum_kernel<kDtype>, grid_of(shape.positions * blocks), threads, 0,
           ensemble, grid, options, blocks, sums);
    launch(queue, device::pool_normaliser_kernel<kDtype>, grid_of(shape.positions), threads, 0,
           ensemble, grid, static_cast<const double*>(sums), out.log_normaliser);
  });
}

void pool_mixture(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                  double* probabilities, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = blocks_a_row(in.shape);
  const dim3 threads(device::kPoolThreads);
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    launch(queue, device::pool_mixture_kernel<decltype(dtype)::value>,
           grid_of(in.shape.positions * blocks), threads, 0, in, device::PoolGrid(options), options,
           log_normaliser, blocks, probabilities);
  });
  launch(queue, device::check_mixture_kernel, grid_of(in.shape.positions), threads, 0,
         in.shape.vocab, probabilities);
}

void pool_log_prob(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                   const std::int64_t* targets, double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks =
      (in.shape.positions + device::kLogProbWarps - 1) / device::kLogProbWarps;
  launch(queue, device::pool_log_prob_kernel, grid_of(blocks),
         dim3(device::kLogProbWarps * device::kWarp), 0, in, device::PoolGrid(options), options,
         log_normaliser, targets, result);
}

}  // namespace adapmixed::cuda
