// D<->_alpha(p || p') of every model and order, as an upper bound, in three kernels: the sums of
// chunks, their sums, and the losses.
//
// A block takes a chunk of the vocabulary at one position, tile by tile: first x of all models
// (cuda_tile.cuh), a thread a token, then the models' moments, a lane a model. A lane adds its
// model's larger x one by one. The chunks' sums are left in the workspace and added in order. The
// number of chunks depends on V, N and K alone, so results are the same on every device and in
// every batch. Positions are queued in groups that share the workspace.
#include <algorithm>

#include "common/launch.cuh"
#include "leave_one_out/cuda_tile.cuh"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr int kBurst = 16;  // tokens whose terms are added one by one; then bursts are added
// Lanes that share a model: each takes a part of the tile. Each half of a warp takes as many models
// as it has lanes.
constexpr int kTileParts = 2;
constexpr int kModelLanes = kWarp / kTileParts;
// A lane's bursts are added up from 0, then the lanes' sums.
static_assert(kBurst + kLossThreads / kTileParts / kBurst - 1 + kTileParts - 1 <= kMomentAdditions);

// Adds p t^{1+k} to s[k], with at most 1 + k roundings, and p |t| to the last one.
template <int kSize>
__device__ inline void add_powers(float p, float t, float (&s)[kSize]) {
  constexpr int kCount = kSize - 1;
  s[kCount] = vfma(p, std::fabs(t), s[kCount]);
  const float square = t * t, cube = square * t, fourth = square * square;
  s[0] = vfma(p, t, s[0]), s[1] = vfma(p, square, s[1]), s[2] = vfma(p, cube, s[2]);
  float power = p * fourth;
#pragma unroll
  for (int k = 3; k < kCount; k += 4) {
    s[k] = s[k] + power;
    if (k + 1 < kCount) s[k + 1] = vfma(power, t, s[k + 1]);
    if (k + 2 < kCount) s[k + 2] = vfma(power, square, s[k + 2]);
    if (k + 3 < kCount) s[k + 3] = vfma(power, cube, s[k + 3]);
    if (k + 4 < kCount) power = power * fourth;
  }
}

// Adds up a burst. `kWide`: some |t| may exceed 1. Those terms are left out, and their bits set.
template <bool kWide, int kCount>
__device__ void add_burst(const TileTokens* tokens, const float* deviations, float (&s)[kCount],
                          unsigned& large) {
#pragma unroll 2
  for (int k = 0; k < kBurst; k += 4, ++tokens, deviations += 4) {
    const TileTokens four = *tokens;
    const Four e = *reinterpret_cast<const Four*>(deviations);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float t = vfma(-e.v[j], four.factor.v[j], four.middle.v[j]);
      if (kWide && !(std::fabs(t) <= 1.0f)) large |= 1u << (k + j), t = 0.0f;
      add_powers(four.p.v[j], t, s);
    }
  }
}

// The sums over the lanes that share a model.
template <class T, int kCount>
__device__ void shared_sum(T (&values)[kCount]) {
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kCount; ++m) values[m] += __shfl_xor_sync(kAllLanes, values[m], kModelLanes);
}

// A chunk of one position. A whole block must call the constructor and run() together.
template <Dtype D>
struct ChunkSums {
  const LossCall& call;
  Tile<D> tile;
  std::uint32_t* wide;  // shared: a bit for each token of a tile at which some |t| may exceed 1
  double* out;

  __device__ void run(std::int64_t begin, std::int64_t end) {
    const int models = static_cast<int>(call.all.models), group = call.layout.models;
    for (std::int64_t start = begin; start < end; start += call.layout.tile) {
      TileToken token = tile.load_public(start);
      Deviations found;
      for (int first = 0; first < models; first += group) {
        const Deviations here = tile.add_group(first, token);
        found.total += here.total;
        found.largest = std::fmax(found.largest, here.largest);
      }
      const unsigned bits = __ballot_sync(kAllLanes, tile.finish(token, found));
      if (lane_id() == 0) wide[warp_id()] = bits;
      for (int first = 0; first < models; first += group) {
        if (models > group) tile.add_group(first, token);
        tile.write_exact(first, token);
        __syncthreads();
        constexpr int kTogether = kLossThreads / kWarp * kModelLanes;
        const int last = tile.end_of(first);
        for (int at = first + warp_id() * kModelLanes; at < last; at += kTogether) {
          with_degree(tile.facts.moments.degree, [&](auto degree) {
            add_moments<decltype(degree)::value>(first, at, start, start == begin);
          });
        }
        __syncthreads();  // the tile has been read
      }
    }
    tile.store(out);
  }

  // Adds the tile's sums of the models from `at` on, of the group from `first` on. `fresh`: nothing
  // has been stored yet. A whole warp must call this together.
  template <int kDegree>
  __device__ void add_moments(int first, int at, std::int64_t start, bool fresh) {
    const int index = at + lane_id() % kModelLanes, end = tile.end_of(first);
    const int part = lane_id() / kModelLanes, length = call.layout.tile / kTileParts;
    const bool present = index < end;
    const int i = present ? index : end - 1;  // a lane without a model reads the last
    const float* deviations = tile.deviations + (i - first) * call.layout.pitch() + part * length;
    float total[kDegree + 2] = {};
    std::uint64_t large = 0;
#pragma unroll 1
    for (int k = 0; k < length; k += kBurst) {
      float s[kDegree + 2] = {};
      const int own = part * length + k, other = (1 - part) * length + k;
      const std::uint32_t bits = wide[own / 32] >> own % 32 | wide[other / 32] >> other % 32;
      const TileTokens* tokens = tile.tokens + own / 4;
      unsigned found = 0;
      if ((bits & 0xffffu) == 0) {  // the same for all lanes
        add_burst<false>(tokens, deviations + k, s, found);
      } else {
        add_burst<true>(tokens, deviations + k, s, found);
      }
      large |= std::uint64_t{found} << k;
#pragma unroll
      for (int m = 0; m <= kDegree + 1; ++m) total[m] = total[m] + s[m];
    }
    shared_sum(total);
    const ModelSums sums = call.model_sums(out, i);
    const auto put = [&](std::int64_t column, double value) {
      if (!present || column % kTileParts != part) return;
      double& to = sums[column];
      to = fresh ? value : to + value;
    };
    const std::int64_t v = start + part * length;
    int hidden =
        total[1] == 0.0f && !answers_public(call.in, call.weights, i, tile.position, v, v + length);
    hidden |= __shfl_xor_sync(kAllLanes, hidden, kModelLanes);
#pragma unroll
    for (int m = 0; m < kDegree; ++m) {
      put(ModelSums::columns(m, call.num_orders),
          m == 0 && hidden != 0 ? kHidden : static_cast<double>(total[1 + m]));
    }
    put(2, total[kDegree + 1]);
    add_listed(large, part * length, deviations, total[0], fresh, put);
  }

  // Adds the tokens of this lane's part of the tile whose bits are set. A whole warp must call this
  // together.
  template <class Put>
  __device__ void add_listed(std::uint64_t large, int begin, const float* deviations, double first,
                             bool fresh, const Put& put) const {
    const double reach = tile.facts.moments.reach;
    const bool any = __ballot_sync(kAllLanes, large != 0) != 0;
    const auto for_each = [&](const auto& visit) {
      for (std::uint64_t bits = large; bits != 0; bits &= bits - 1) {
        const int k = __ffsll(static_cast<long long>(bits)) - 1, at = begin + k;
        const TileTokens& four = tile.tokens[at / 4];
        const float factor = four.factor.v[at % 4], middle = four.middle.v[at % 4];
        const Neighbour other(vfma(-deviations[k], factor, middle) * reach);
        const double p = tile.mixture[at];
        if (p != 0.0) visit(other, p, reach * std::fabs(middle), reach * factor);
      }
    };
    double both[2] = {0.0, 0.0};
    for_each([&](const Neighbour& other, double p, double, double) {
      both[0] += p * other.x;
      both[1] += p * other.x * other.x;
    });
    shared_sum(both);
    put(0, reach * first + both[0]);
    if (!any && !fresh) return;
    put(1, both[1]);
    const float most_log = static_cast<float>(80.0 / call.all.largest_order);
    const FloatErrors errors = tile.facts.errors(call.all);
#pragma unroll 1
    for (int k = 0; k < 2 * call.num_orders; ++k) {
      const double order = call.orders[k / 2], s = k % 2 == 0 ? order : 1.0 - order;
      ListedSums found;
      for_each([&](const Neighbour& other, double p, double middle, double factor) {
        const auto x = static_cast<float>(other.x);
        const FloatLog<float> log = float_log(x, static_cast<float>(other.X));
        const bool in_floats = order > kLeastFloatOrder && std::fabs(log.log) < most_log;
        double term, size = std::fabs(static_cast<double>(log.log));
        if (in_floats) {
          term = p * power_excess(x, log, static_cast<float>(s));
        } else {
          const LogParts<double> exact = log_parts(other.x, other.X);
          term = p * power(other.x, exact, s).excess, size = std::fabs(exact.log);
        }
        const double error = factor < 0.0 ? 0.0 : errors.of(other.x, middle, factor);
        found.add({term, term * size, term * error, term * size * error}, s, in_floats);
      });
      double sums[3] = {found.value, found.weight, found.rough};
      shared_sum(sums);
#pragma unroll
      for (int m = 0; m < 3; ++m) put(3 + 3 * k + m, sums[m]);
    }
  }
};

template <Dtype D>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks)
    chunk_sums_kernel(const __grid_constant__ LossCall call) {
  __shared__ std::uint32_t wide[kLossThreads / kWarp];
  const std::int64_t member = blockIdx.x / call.layout.chunks;
  const std::int64_t index = blockIdx.x % call.layout.chunks;
  const std::int64_t length = call.layout.chunk * call.layout.tile, begin = index * length;
  const std::int64_t end =
      begin + length < call.in.shape.vocab ? begin + length : call.in.shape.vocab;
  ChunkSums<D>{call, {call, call.first + member}, wide, call.chunk_sums(member, index)}.run(begin,
                                                                                            end);
}

// A block adds up kWarp of a position's numbers over all chunks, in the place of the first chunk's.
constexpr int kAddThreads = 256;
__global__ void __launch_bounds__(kAddThreads)
    add_chunks_kernel(const __grid_constant__ LossCall call, std::int64_t blocks) {
  __shared__ double partial[kAddThreads / kWarp][kWarp];
  const std::int64_t member = blockIdx.x / blocks;
  double* sums = call.chunk_sums(member, 0) + LossLayout::kHeader;
  const int degree = static_cast<int>(call.header(member, 0).degree);
  const std::int64_t count = call.all.models * ModelSums::columns(degree, call.num_orders);
  const std::int64_t at = blockIdx.x % blocks * kWarp + lane_id();
  double total = 0.0;
  if (at < count) {
    for (std::int64_t c = warp_id(); c < call.layout.chunks; c += kAddThreads / kWarp) {
      total += sums[c * call.layout.per_chunk + at];
    }
  }
  partial[warp_id()][lane_id()] = total;
  __syncthreads();
  if (warp_id() != 0 || at >= count) return;
  for (int w = 1; w < kAddThreads / kWarp; ++w) total += partial[w][lane_id()];
  sums[at] = total;
}

// A larger |sum of p_bar_i - q| or |sum of q - 1| shows that the projection is of other rows.
constexpr double kMostBalance = 1e-5;

// A thread takes a loss: number `at` of the (K, N) of a position, so that most lanes of a warp read
// the same interpolants. These are arguments, which may have 32 KB; those of one order fit 4 KB
// with everything else.
template <int kOrders>
__global__ void __launch_bounds__(kLossThreads)
    losses_kernel(const __grid_constant__ LossCall call,
                  const __grid_constant__ ExcessFits<kOrders> fits, std::int64_t blocks) {
  const std::int64_t member = blockIdx.x / blocks, position = call.first + member;
  const std::int64_t models = call.all.models;
  const LossFacts facts(call, position);
  double* sums = call.chunk_sums(member, 0);
  double totals[3] = {0.0, 0.0, 0.0}, most[3] = {0.0, 0.0, 0.0}, norm = 0.0;
  for (std::int64_t c = threadIdx.x; c < call.layout.chunks; c += blockDim.x) {
    const ChunkHeader& header = call.header(member, c);
    totals[0] += header.mass, totals[1] += header.tokens.balance;
    totals[2] += header.tokens.common;
    most[0] = std::fmax(most[0], header.tokens.most_common);
    most[1] = std::fmax(most[1], header.tokens.growth);
  }
  block_reduce(totals, Add{});
  for (std::int64_t i = threadIdx.x; i < models; i += blockDim.x) {
    const ModelSums own = call.model_sums(sums, i);
    norm += std::sqrt(own.second(facts.moments.reach));
    most[2] = vmax(most[2], std::fabs(call.all.balance(own[0], totals[1])));  // NaN stays
  }
  const double mean_norm = block_sum(norm) / static_cast<double>(models);
  block_reduce(most, Max{});
  const std::int64_t at = blockIdx.x % blocks * kLossThreads + threadIdx.x;
  if (at >= models * call.num_orders) return;
  const std::int64_t i = at % models, k = at / models, row = i * call.in.shape.positions + position;
  const ModelSums own = call.model_sums(sums, i);
  if (k == 0) call.balance[row] = call.all.balance(own[0], totals[1]);
  double loss = HUGE_VAL;
  // The rows belong to the log-sum-exps, and all can be bounded. NaN fails.
  if (facts.admissible && std::fabs(totals[0] - 1.0) < kMostBalance && most[2] < kMostBalance &&
      most[1] < HUGE_VAL) {
    const LossBound bound(call.all, facts.moments, {totals[1], totals[2], most[0], most[1]},
                          mean_norm, facts.errors(call.all), facts.ratio_error);
    loss = bound.loss(fits.of[k][facts.moments.index], own, k, call.orders[k]);
  }
  call.loss[row * call.num_orders + k] = loss;
}

}  // namespace
ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  const device::LossLayout layout(shape, num_orders);
  return layout.positions * layout.chunks * layout.per_chunk * 8;
}

static void leave_one_out(const Ensemble& in, const Weights& weights,
                          const LeaveOneOutOptions& options, double* loss, double* balance,
                          const Queue& queue) {
  const DeviceGuard guard(queue);
  const device::Neighbours all(in.shape, weights.upper > 0.0, options);
  const device::LossLayout layout(in.shape, options.num_orders);
  device::LossCall call{in,
                        weights,
                        all,
                        layout,
                        static_cast<double*>(queue.workspace),
                        loss,
                        balance,
                        0,
                        static_cast<int>(options.num_orders),
                        {}};
  std::copy_n(options.orders, call.num_orders, call.orders);
  const auto shared = static_cast<std::size_t>(layout.shared_bytes());
  const std::int64_t numbers =
      in.shape.models * device::ModelSums::columns(device::kMaxMoments, call.num_orders);
  const std::int64_t sums = (numbers + device::kWarp - 1) / device::kWarp;
  const std::int64_t losses =
      (in.shape.models * call.num_orders + device::kLossThreads - 1) / device::kLossThreads;
  const dim3 threads(device::kLossThreads);
  for (; call.first < in.shape.positions; call.first += layout.positions) {
    const std::int64_t here = std::min(layout.positions, in.shape.positions - call.first);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      launch(queue, device::chunk_sums_kernel<decltype(dtype)::value>,
             grid_of(here * layout.chunks), threads, shared, call);
    });
    launch(queue, device::add_chunks_kernel, grid_of(here * sums), dim3(device::kAddThreads), 0,
           call, sums);
    const auto queue_losses = [&](auto most) {
      constexpr int kOrders = decltype(most)::value;
      launch(queue, device::losses_kernel<kOrders>, grid_of(here * losses), threads, 0, call,
             device::fits_of<kOrders>(options.orders, call.num_orders), losses);
    };
    if (call.num_orders == 1) {
      queue_losses(std::integral_constant<int, 1>{});
    } else {
      queue_losses(std::integral_constant<int, kMaxOrders>{});
    }
  }
}

void add_leave_one_out(Table& table) {
  table.leave_one_out = leave_one_out;
  table.leave_one_out_workspace = leave_one_out_workspace;
}

}  // namespace adapmixed::cuda
