// Noisy screening of every position on the public top-k tokens: one block per position.
#include <algorithm>

#include "common/launch.cuh"
#include "screen/cuda_top_tokens.cuh"
#include "screen/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kScreenThreads = 512;
static_assert(kScreenThreads >= kDigits);

// Up to this many tokens, their keys and numbers are kept in shared memory; else in the workspace.
constexpr std::int64_t kMostShared = 2048;

__host__ __device__ inline std::int64_t bytes_kept(std::int64_t size) {
  return size * static_cast<std::int64_t>(sizeof(std::uint64_t) + sizeof(double));
}

// log(s/q) of one token. The models are summed in order. A whole warp must call this together.
__device__ inline double screened_log_ratio(const Ensemble& in, const ScreenOptions& options,
                                            const ScreeningMean& mean, std::int64_t position,
                                            std::int64_t token, double log_q, double noise) {
  const double q = std::exp(log_q);
  double sum_p = 0.0, sum_difference = 0.0;
  for (std::int64_t first = 0; first < in.shape.models; first += kWarp) {
    const std::int64_t i = first + lane_id();
    const bool on = i < in.shape.models && screened_active(in, options, i, position);
    const double p = on ? std::exp(screened_log_p(in, i, position, token)) : 0.0;
    const double difference = on ? p - q : 0.0;
    for (int lane = 0; lane < kWarp; ++lane) {
      sum_p += __shfl_sync(kAllLanes, p, lane);
      sum_difference += __shfl_sync(kAllLanes, difference, lane);
    }
  }
  if (!mean.rare(log_q, sum_p)) return mean.log_ratio(log_q, sum_p, sum_difference, noise);
  double log_sum_p = -HUGE_VAL;
  for (std::int64_t first = 0; first < in.shape.models; first += kWarp) {
    const std::int64_t i = first + lane_id();
    const bool on = i < in.shape.models && screened_active(in, options, i, position);
    const double log_p = on ? screened_log_p(in, i, position, token) : -HUGE_VAL;
    for (int lane = 0; lane < kWarp; ++lane) {
      log_sum_p = log_add(log_sum_p, __shfl_sync(kAllLanes, log_p, lane));
    }
  }
  return mean.rare_log_ratio(log_q, log_sum_p, noise);
}

// D_alpha(s || q) over the kept tokens, given t = log(s/q); +inf if a t is NaN. A whole block must
// call this together.
__device__ inline double kept_divergence(const double* t, const std::uint64_t* keys,
                                         std::int64_t count, double order) {
  ScreeningSums sums(order);
  const double best = logit_of_key(keys[0]);
  const auto l = [&](std::int64_t j) { return logit_of_key(keys[j]) - best; };
  double largest = -HUGE_VAL;
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    largest = std::fmax(largest, l(j) + t[j]);
  }
  if (!sums.set_largest(block_max(largest))) return HUGE_VAL;
  double totals[2] = {0.0, 0.0};  // s, q
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    totals[0] += sums.s_part(t[j], l(j));
    totals[1] += sums.q_part(l(j));
  }
  block_sum(totals);
  if (!sums.set_totals(totals[0], totals[1])) return HUGE_VAL;
  double top = -HUGE_VAL;
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    top = std::fmax(top, sums.log_term(t[j], l(j)));
  }
  sums.set_top(block_max(top));
  double total = 0.0;
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) total += sums.term(t[j], l(j));
  return sums.divergence(block_sum(total));
}

template <Dtype D>
__device__ double screened_divergence(const Ensemble& in, const ScreenOptions& options,
                                      std::int64_t position, std::uint64_t* keys, double* t) {
  const std::int64_t vocab = in.shape.vocab;
  const double lse = in.public_lse[position];
  const auto* row = row_bits<D>(in.public_logits, 0, position);
  // The numbers of tokens that are not masked, of active rows, and of active rows without a
  // log-sum-exp.
  double found[3] = {0.0, 0.0, 0.0};
  for_each_token<D>(row, vocab, [&](std::int64_t v, float z) {
    if (token_key(z, v) != kNoKey) found[0] += 1.0;
  });
  for (std::int64_t i = threadIdx.x; i < in.shape.models; i += blockDim.x) {
    if (!screened_active(in, options, i, position)) continue;
    found[1] += 1.0;
    if (!std::isfinite(in.private_lse[i * in.shape.positions + position])) found[2] += 1.0;
  }
  block_sum(found);
  if (!std::isfinite(lse) || found[2] > 0.0) return HUGE_VAL;
  const auto present = static_cast<std::int64_t>(found[0]);
  const std::int64_t count = options.top_k < present ? options.top_k : present;
  if (count <= 0) return HUGE_VAL;
  top_keys<D>(row, vocab, present, count, keys);
  const ScreeningMean mean(options, static_cast<std::int64_t>(found[1]));
  for (std::int64_t j = warp_id(); j < count; j += warp_count()) {
    const double log_q = logit_of_key(keys[j]) - lse;
    const double noise = options.noise[position * options.top_k + j];
    const double own =
        screened_log_ratio(in, options, mean, position, token_of_key(keys[j]), log_q, noise);
    if (lane_id() == 0) t[j] = own;
  }
  __syncthreads();
  return kept_divergence(t, keys, count, options.order);
}

// `size`: sort_size of the largest number of tokens that a position keeps.
template <Dtype D>
__global__ void __launch_bounds__(kScreenThreads, 1)
    screen_kernel(Ensemble in, ScreenOptions options, std::int64_t size, char* workspace,
                  double* divergence, bool* passed) {
  const std::int64_t b = blockIdx.x;
  char* memory = size <= kMostShared ? dynamic_shared<char>() : workspace + b * bytes_kept(size);
  auto* keys = reinterpret_cast<std::uint64_t*>(memory);
  const double result =
      screened_divergence<D>(in, options, b, keys, reinterpret_cast<double*>(keys + size));
  if (threadIdx.x == 0) {
    divergence[b] = result;
    passed[b] = result <= options.threshold;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

static std::int64_t screen_workspace(const Shape& shape, std::int64_t top_k) {
  const std::int64_t size = device::sort_size(std::min(top_k, shape.vocab));
  return size <= device::kMostShared ? 0 : shape.positions * device::bytes_kept(size);
}

static void screen(const Ensemble& in, const ScreenOptions& options, double* divergence,
                   bool* passed, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t size = device::sort_size(std::min(options.top_k, in.shape.vocab));
  const bool shared = size <= device::kMostShared;
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    launch(queue, device::screen_kernel<decltype(dtype)::value>, grid_of(in.shape.positions),
           dim3(device::kScreenThreads),
           shared ? static_cast<std::size_t>(device::bytes_kept(size)) : 0, in, options, size,
           static_cast<char*>(queue.workspace), divergence, passed);
  });
}

void add_screen(Table& table) {
  table.screen = screen;
  table.screen_workspace = screen_workspace;
}

}  // namespace adapmixed::cuda
