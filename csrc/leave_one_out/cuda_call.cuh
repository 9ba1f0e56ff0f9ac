// The arguments of the kernels of one leave-one-out call, and where its sums lie.
//
// A block takes a chunk of the vocabulary at one position, tile by tile, and leaves its sums in the
// workspace; the chunks' sums are added in order. The number of chunks depends on V, N and K alone,
// so results are the same on every device and in every batch. Positions are queued in groups that
// share the workspace.
#pragma once

#include <algorithm>

#include "clip/formula.h"
#include "common/block.cuh"
#include "common/load.cuh"
#include "leave_one_out/bound.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kLossThreads = 128;  // and the most tokens of a tile
constexpr std::int64_t kMostLossChunks = 512;
constexpr std::int64_t kLossMemory = std::int64_t{1} << 23;  // doubles: 64 MiB
// Dynamic shared memory with which kLossBlocks have room on a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLossBlocks = 2;
#else
constexpr int kLossBlocks = 3;
#endif
constexpr std::int64_t kLossShared = 72 * 1024;

// The constants with which one model's row is read (common/float_ratio.h).
struct alignas(16) FloatModel {
  float c, centre, slope, offset;  // delta = slope (r' - 1) + offset
};

struct alignas(16) Four {
  float v[4];
};
// Four tokens next to each other: t = x / reach of a model is middle - deviation * factor. A
// negative factor marks a token that was computed in double.
struct TileTokens {
  Four middle, factor, p;
};

// How the work is divided. A tile's deviations, of a group of models, lie in shared memory.
struct LossLayout {
  int tile, models;                   // tokens, whole warps; models of a group
  std::int64_t chunk, chunks;         // tiles of a chunk; chunks of a position
  std::int64_t per_chunk, positions;  // doubles of a chunk; positions of a launch

  LossLayout(const Shape& shape, std::int64_t orders) {
    models = static_cast<int>(std::min(shape.models, simulated_or(shape.models, 48)));
    for (tile = static_cast<int>(simulated_or(kLossThreads, 64)); tile > kWarp; tile -= kWarp) {
      if (shared_bytes() <= kLossShared) break;
    }
    while (shared_bytes() > kLossShared) models = models / 2;
    per_chunk = kHeader + shape.models * columns(kMaxMoments, orders);
    const std::int64_t tiles = (shape.vocab + tile - 1) / tile;
    const std::int64_t most = std::min(kLossMemory / per_chunk, simulated_or(kMostLossChunks, 2));
    chunk = most < 1 ? tiles : (tiles + most - 1) / most;
    chunks = (tiles + chunk - 1) / chunk;
    const std::int64_t rows = std::max<std::int64_t>(kLossMemory / (chunks * per_chunk), 1);
    positions = std::min(rows, shape.positions);
  }

  // Of a position's tokens: mass of the mixture, TokenSums (an infinite growth: no loss can be
  // bounded), and the index of the degree.
  static constexpr int kHeader = 6;
  // Numbers of a model: sum p x, sum p x^2 of listed tokens, ListedSums of both directions for each
  // order, and moments. Numbers of the same kind lie together.
  ADAPMIXED_HD static std::int64_t columns(int degree, std::int64_t orders) {
    return 2 + 8 * orders + degree;
  }
  // 4 times an odd number: lanes that read four tokens of their own models use different banks.
  ADAPMIXED_HD int pitch() const { return tile + 4; }
  ADAPMIXED_HD std::int64_t shared_bytes() const {
    return (3 * 4 + 8) * tile +
           models * (4 * pitch() + static_cast<std::int64_t>(sizeof(FloatModel)));
  }
};

struct LossOrders {
  double value[kMaxOrders];
  int count;
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossOrders orders;
  LossLayout layout;
  double reach[kDegrees];  // moment_reach
  std::int64_t first;      // position of this launch
  double* sums;            // (positions, chunks, per_chunk)
  double *loss, *balance;

  __device__ double* chunk_sums(std::int64_t member, std::int64_t chunk) const {
    return sums + (member * layout.chunks + chunk) * layout.per_chunk;
  }
  __device__ double divisor() const { return all.against_public ? all.slots : all.slots - 1.0; }
};

// What the weights and log-sum-exps of a position say. A whole block must call this together.
struct LossFacts {
  double mean_weight, largest_weight, ratio_error;
  bool admissible;
  int degree;  // index for degree_at

  __device__ LossFacts(const LossCall& call, std::int64_t position) {
    double most[3] = {0.0, 0.0, 0.0}, total = 0.0;
    const double public_lse = call.in.public_lse[position];
    for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
      const std::int64_t at = i * call.in.shape.positions + position;
      const double weight = call.weights.weight[at], lse = call.in.private_lse[at];
      total += weight;
      most[0] = std::fmax(most[0], weight);
      most[1] = std::fmax(most[1], double_ratio_error(lse, public_lse));
      if (!ADAPMIXED_ISA::admissible(call.in, call.weights, at)) most[2] = 1.0;
    }
    mean_weight = block_sum(total) / call.all.slots;
    block_reduce(most, Max{});
    largest_weight = call.weights.upper > 0.0 ? call.weights.upper : most[0];
    ratio_error = most[1];
    admissible = most[2] == 0.0 && std::fabs(public_lse) < HUGE_VAL;
    degree = loss_degree(call.all, largest_weight);
  }
};

// What a block of the losses keeps of a tile, and the work on single tokens: terms of the moments,
// and tokens in double.

constexpr int kModelsAtOnce = 8;  // that a thread reads; their deviations are added in floats
constexpr int kBurst = 16;        // tokens whose terms are added one by one; then bursts are added
// Lanes that share a model: each takes a part of the tile. Each half of a warp takes as many models
// as it has lanes.
constexpr int kTileParts = 2;
constexpr int kModelLanes = kWarp / kTileParts;
// A lane's bursts are added up from 0, then the lanes' sums.
static_assert(kBurst + kLossThreads / kTileParts / kBurst - 1 + kTileParts - 1 <= kMomentAdditions);

// The shared memory of a block.
struct TileMemory {
  FloatModel* models;  // of the group
  TileTokens* tokens;  // of the tile, in fours
  double* mixture;     // p of the tokens
  float* deviations;   // (models of the group, pitch)

  __device__ explicit TileMemory(const LossLayout& layout)
      : models(dynamic_shared<FloatModel>()),
        tokens(reinterpret_cast<TileTokens*>(models + layout.models)),
        mixture(reinterpret_cast<double*>(tokens + layout.tile / 4)),
        deviations(reinterpret_cast<float*>(mixture + layout.tile)) {}
};

// A token as its thread sees it.
struct TileToken {
  std::int64_t v;
  bool counted, exact;  // it exists and is not masked; it is computed in double
  float z0;             // the public logit
  FloatToken a;         // of the centred logit (common/float_ratio.h)
  double q;
  Projected<double> mean;  // of p_bar / q over the slots, of exact tokens
};

// The sum of some models' deviations, and the largest of their sizes.
struct Deviations {
  double total = 0.0;
  float largest = 0.0f;
};

// What a thread adds up over its tokens.
struct ThreadSums {
  double mass = 0.0, balance = 0.0, common = 0.0;
  float most_common = 0.0f, growth = 0.0f;  // rounded up; see TokenSums
};
__device__ inline float rounded_up(double x) { return static_cast<float>(x * (1.0 + 1e-6)); }

// Adds p t^{1+k} to s[k], with at most 1 + k roundings (bound.h).
template <int kCount>
__device__ inline void add_powers(float p, float t, float (&s)[kCount]) {
  const float square = t * t, cube = square * t, fourth = square * square;
  s[0] = vfma(p, t, s[0]);
  s[1] = vfma(p, square, s[1]);
  s[2] = vfma(p, cube, s[2]);
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

// Tokens in double.

// One model at one position.
template <Dtype D>
struct ModelRow {
  const typename Bits<D>::type* logits;
  double shift, least;  // log p/q = z - z_0 - shift, or -inf if z < least
  double weight, rest;  // 0 and 1 if the slot answers q
  double lower, upper;  // upper > 0: a box, as in Weights (common/operators.h)

  __device__ Projected<double> projected_from(double t) const {
    return upper > 0.0 ? clipped(t, weight, rest, lower, upper) : projected(t, weight, rest);
  }

  __device__ double log_ratio(std::int64_t v, double z0) const {
    const double z = logit<D>(logits, v);
    return z < least ? -HUGE_VAL : z - z0 - shift;
  }
};

template <Dtype D>
__device__ inline ModelRow<D> model_row(const Ensemble& in, const Weights& weights,
                                        std::int64_t model, std::int64_t position) {
  const std::int64_t at = model * in.shape.positions + position;
  const auto* logits = row_bits<D>(in.private_logits, model, position);
  const double lse = in.private_lse[at], shift = lse - in.public_lse[position];
  const double least = weights.upper > 0.0 ? least_clipped(lse) : -HUGE_VAL;
  if (weights.active != nullptr && !weights.active[at]) {
    return {logits, shift, least, 0.0, 1.0, 0.0, 0.0};
  }
  return {logits,        shift,        least, weights.weight[at], rest_of(weights, at),
          weights.lower, weights.upper};
}

template <Dtype D>
__device__ Projected<double> answer(const ModelRow<D>& row, std::int64_t v, double z0) {
  return row.projected_from(vmin(kMostLogRatio, row.log_ratio(v, z0)));
}

struct ExactToken {
  Projected<double> mean;
  double p;
  bool bounded;
};
template <Dtype D>
__device__ ExactToken exact_token(const LossCall& call, std::int64_t position, std::int64_t v,
                                  double z0, double q) {
  const Neighbours& all = call.all;
  Projected<double> total{0.0, all.absent};
  bool answered = false, lost = false;
#pragma unroll 1
  for (std::int64_t i = 0; i < call.in.shape.models; ++i) {
    const ModelRow<D> row = model_row<D>(call.in, call.weights, i, position);
    const Projected<double> own = answer(row, v, z0);
    answered = answered || row.log_ratio(v, z0) > kMaskedLog;
    total = {total.excess + own.excess, total.ratio + own.ratio};
  }
  const Projected<double> mean{total.excess / all.slots, total.ratio / all.slots};
  const MixtureToken<double> mixture = mixture_token(all, q, mean, lost);
  const double log_q = z0 - call.in.public_lse[position];
  return {mean, mixture.p, !unbounded(all, mixture, lost, answered, q, log_q)};
}

// What `kept` returns for model i.
template <Dtype D>
__device__ double exact_neighbour(const LossCall& call, std::int64_t position, std::int64_t v,
                                  double z0, std::int64_t i, const MixtureToken<double>& mixture) {
  const auto of = [&](std::int64_t j) {
    return answer(model_row<D>(call.in, call.weights, j, position), v, z0);
  };
  bool dominated = false;
  const NeighbourToken<double> other = neighbour_token(call.all, mixture, of(i), dominated);
  if (!(mixture.p > 0.0)) return 0.0;
  if (!dominated) return kept(other.x, other.X);
  double rest = call.all.absent;
#pragma unroll 1
  for (std::int64_t j = 0; j < call.in.shape.models; ++j) {
    if (j != i) rest += of(j).ratio;
  }
  const double X = ratio_from_rest(call.all, rest, mixture.total);
  return kept(X - 1.0, X);
}

// Whether model i's answer may differ from q at `length` tokens from v on.
template <Dtype D>
__device__ bool differs(const LossCall& call, std::int64_t position, std::int64_t i, std::int64_t v,
                        int length) {
  const ModelRow<D> row = model_row<D>(call.in, call.weights, i, position);
  const bool speaks = row.upper > 0.0 || row.weight > 0.0;  // neither if a slot is not active
  const double lse = call.in.private_lse[i * call.in.shape.positions + position];
  if (!speaks || lse != call.in.public_lse[position]) return speaks;
  const auto* other = row_bits<D>(call.in.public_logits, 0, position);
  for (const std::int64_t end = v + length; v < end && v < call.in.shape.vocab; ++v) {
    if (row.logits[v] != other[v]) return true;
  }
  return false;
}

ADAPMIXED_CORE_END
