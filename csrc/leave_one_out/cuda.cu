// D<->_alpha(p || p') of every model and order, as an upper bound (bound.h), in three kernels: the
// sums of chunks (cuda_tile.cuh), their sums, and the losses.
#include <algorithm>
#include <cstring>

#include "common/launch.cuh"
#include "leave_one_out/cuda_call.cuh"
#include "leave_one_out/cuda_tile.cuh"

ADAPMIXED_CORE_BEGIN
namespace {

// Interpolants reach the kernel as its arguments, which may have 32 KB; those of one order fit 4 KB
// with everything else.
template <int kOrders>
LossFits<kOrders> first_of(const LossFits<kMaxOrders>& fits) {
  LossFits<kOrders> some;
  std::memcpy(&some, &fits, sizeof some);
  return some;
}

template <Dtype D>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks)
    chunk_sums_kernel(const __grid_constant__ LossCall call) {
  __shared__ std::uint32_t wide[kLossThreads / kWarp];
  const std::int64_t member = blockIdx.x / call.layout.chunks;
  const std::int64_t index = blockIdx.x % call.layout.chunks;
  const std::int64_t length = call.layout.chunk * call.layout.tile, begin = index * length;
  const std::int64_t end =
      begin + length < call.in.shape.vocab ? begin + length : call.in.shape.vocab;
  ChunkSums<D>(call, call.first + member, call.chunk_sums(member, index)).run(begin, end, wide);
}

// A block adds up kWarp of a position's numbers over all chunks, in the place of the first chunk's.
constexpr int kAddThreads = 256;
__global__ void __launch_bounds__(kAddThreads)
    add_chunks_kernel(const __grid_constant__ LossCall call, std::int64_t blocks) {
  __shared__ double partial[kAddThreads / kWarp][kWarp];
  const std::int64_t member = blockIdx.x / blocks;
  double* sums = call.chunk_sums(member, 0);
  const int degree = degree_at(static_cast<int>(sums[LossLayout::kHeader - 1]));
  const std::int64_t count = call.in.shape.models * LossLayout::columns(degree, call.orders.count);
  const std::int64_t at = blockIdx.x % blocks * kWarp + lane_id();
  double total = 0.0;
  if (at < count) {
    for (std::int64_t c = warp_id(); c < call.layout.chunks; c += kAddThreads / kWarp) {
      total += sums[c * call.layout.per_chunk + LossLayout::kHeader + at];
    }
  }
  partial[warp_id()][lane_id()] = total;
  __syncthreads();
  if (warp_id() != 0 || at >= count) return;
  for (int w = 1; w < kAddThreads / kWarp; ++w) total += partial[w][lane_id()];
  sums[LossLayout::kHeader + at] = total;
}

// The sums of a position. A whole block must call this together.
struct PositionSums {
  const LossCall& call;
  const double* sums;
  double mass, mean_norm, largest_balance;
  TokenSums tokens;
  int degree;
  double reach;

  __device__ PositionSums(const LossCall& of, std::int64_t member)
      : call(of), sums(of.chunk_sums(member, 0)) {
    double totals[3] = {0.0, 0.0, 0.0}, most[3] = {0.0, 0.0, 0.0}, norm = 0.0;
    for (std::int64_t c = threadIdx.x; c < call.layout.chunks; c += blockDim.x) {
      const double* header = sums + c * call.layout.per_chunk;
      for (int k = 0; k < 3; ++k) totals[k] += header[k];
      for (int k = 0; k < 2; ++k) most[k] = std::fmax(most[k], header[3 + k]);
    }
    block_reduce(totals, Add{});
    mass = totals[0], tokens.balance = totals[1], tokens.common = totals[2];
    const int index = static_cast<int>(sums[LossLayout::kHeader - 1]);
    degree = degree_at(index), reach = call.reach[index];
    for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
      norm += std::sqrt(second(i));
      most[2] = vmax(most[2], std::fabs(balance(i)));  // NaN stays
    }
    mean_norm = block_sum(norm) / static_cast<double>(call.in.shape.models);
    block_reduce(most, Max{});
    tokens.most_common = most[0], tokens.growth = most[1], largest_balance = most[2];
  }

  __device__ const double& number(std::int64_t column, std::int64_t i) const {
    return sums[LossLayout::kHeader + column * call.in.shape.models + i];
  }
  struct Moments {
    const double* from;
    std::int64_t stride;
    __device__ double operator[](int k) const { return from[k * stride]; }
  };
  __device__ Moments moments(std::int64_t i) const {
    return {&number(LossLayout::columns(0, call.orders.count), i), call.in.shape.models};
  }
  __device__ double second(std::int64_t i) const {
    return reach * reach * moments(i)[0] + number(1, i);
  }
  __device__ ListedSums listed(std::int64_t i, int k, bool reverse) const {
    const std::int64_t column = 2 + 8 * k + 4 * reverse;
    return {number(column, i), number(column + 1, i), number(column + 2, i), number(column + 3, i)};
  }
  // Against the public distribution sum p x = -(sum q delta) / slots. Otherwise it is the mean of
  // sum q delta minus this model's, divided by slots - 1.
  __device__ double balance(std::int64_t i) const {
    const double first = number(0, i), slots = call.all.slots;
    return call.all.against_public ? -slots * first : tokens.balance - (slots - 1.0) * first;
  }
  // Whether the rows belong to the log-sum-exps, and all can be bounded. NaN fails.
  __device__ bool good() const {
    return std::fabs(mass - 1.0) < kMostBalance && largest_balance < kMostBalance &&
           tokens.growth < HUGE_VAL;
  }
};

// A thread takes a loss: number `at` of the (K, N) of a position, so that most lanes of a warp read
// the same interpolants.
template <int kOrders>
__global__ void __launch_bounds__(kLossThreads)
    losses_kernel(const __grid_constant__ LossCall call,
                  const __grid_constant__ LossFits<kOrders> fits, std::int64_t blocks) {
  const std::int64_t member = blockIdx.x / blocks, position = call.first + member;
  const std::int64_t models = call.in.shape.models;
  const LossFacts facts(call, position);
  const PositionSums sums(call, member);
  const std::int64_t at = blockIdx.x % blocks * kLossThreads + threadIdx.x;
  if (at >= models * call.orders.count) return;
  const std::int64_t i = at % models;
  const int k = static_cast<int>(at / models);
  const double order = call.orders.value[k];
  double loss = HUGE_VAL;
  if (facts.admissible && sums.good()) {
    const LossBound bound(call.all, sums.reach, sums.degree, sums.tokens, sums.mean_norm,
                          facts.largest_weight, facts.ratio_error);
    const auto excess = [&](bool reverse) {
      return bound.excess(fits.of[k][facts.degree][reverse], sums.moments(i),
                          sums.listed(i, k, reverse), order);
    };
    const double norm = call.all.against_public ? sums.second(i) : sums.mean_norm;
    loss = norm == 0.0 ? 0.0 : divergence_from_excess(excess(false), excess(true), order);
  }
  call.loss[(i * call.in.shape.positions + position) * call.orders.count + k] = loss;
  if (k == 0) call.balance[i * call.in.shape.positions + position] = sums.balance(i);
}

}  // namespace
ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

static std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  const device::LossLayout layout(shape, num_orders);
  return layout.positions * layout.chunks * layout.per_chunk * 8;
}

static void leave_one_out(const Ensemble& in, const Weights& weights,
                          const LeaveOneOutOptions& options, double* loss, double* balance,
                          const Queue& queue) {
  const DeviceGuard guard(queue);
  const device::LossLayout layout(in.shape, options.num_orders);
  device::LossCall call{in, weights, device::neighbours_of(in.shape, options), {},   layout,
                        {}, 0,       static_cast<double*>(queue.workspace),    loss, balance};
  call.orders.count = static_cast<int>(options.num_orders);
  for (int k = 0; k < call.orders.count; ++k) call.orders.value[k] = options.orders[k];
  for (int k = 0; k < device::kDegrees; ++k) {
    call.reach[k] = device::moment_reach(call.all.largest_order, device::degree_at(k));
  }
  const auto& fits = device::fits_of(options.orders, options.num_orders);
  const auto shared = static_cast<std::size_t>(layout.shared_bytes());
  const std::int64_t numbers =
      in.shape.models * device::LossLayout::columns(device::kMaxMoments, call.orders.count);
  const std::int64_t sums = (numbers + device::kWarp - 1) / device::kWarp;
  const std::int64_t losses =
      (in.shape.models * call.orders.count + device::kLossThreads - 1) / device::kLossThreads;
  const dim3 threads(device::kLossThreads);
  for (call.first = 0; call.first < in.shape.positions; call.first += layout.positions) {
    const std::int64_t here = std::min(layout.positions, in.shape.positions - call.first);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      launch(queue, device::chunk_sums_kernel<decltype(dtype)::value>,
             grid_of(here * layout.chunks), threads, shared, call);
    });
    launch(queue, device::add_chunks_kernel, grid_of(here * sums), dim3(device::kAddThreads), 0,
           call, sums);
    if (call.orders.count == 1) {
      launch(queue, device::losses_kernel<1>, grid_of(here * losses), threads, 0, call,
             device::first_of<1>(fits), losses);
    } else {
      launch(queue, device::losses_kernel<kMaxOrders>, grid_of(here * losses), threads, 0, call,
             fits, losses);
    }
  }
}

void add_leave_one_out(Table& table) {
  table.leave_one_out = leave_one_out;
  table.leave_one_out_workspace = leave_one_out_workspace;
}

}  // namespace adapmixed::cuda
