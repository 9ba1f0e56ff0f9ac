// A tile of one position's vocabulary: x = p'/p - 1 of all models at its tokens, a thread a token.
// First deviations are computed in single precision, then what the models share at a token; a
// thread computes its token in double if that is not accurate enough.
#pragma once

#include <algorithm>

#include "common/block.cuh"
#include "common/load.cuh"
#include "leave_one_out/formula.h"

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
constexpr int kModelsAtOnce = 8;  // that a thread reads; their deviations are added in floats

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

// What the numbers of a chunk begin with.
struct ChunkHeader {
  double mass;  // of the mixture
  TokenSums tokens;
  double degree;  // of the moments
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
    per_chunk = kHeader + shape.models * ModelSums::columns(kMaxMoments, orders);
    const std::int64_t tiles = (shape.vocab + tile - 1) / tile;
    const std::int64_t most = std::min(kLossMemory / per_chunk, simulated_or(kMostLossChunks, 2));
    chunk = most < 1 ? tiles : (tiles + most - 1) / most;
    chunks = (tiles + chunk - 1) / chunk;
    const std::int64_t rows = std::max<std::int64_t>(kLossMemory / (chunks * per_chunk), 1);
    positions = std::min(rows, shape.positions);
  }

  static constexpr int kHeader = sizeof(ChunkHeader) / sizeof(double);
  // 4 times an odd number: lanes that read four tokens of their own models use different banks.
  ADAPMIXED_HD int pitch() const { return tile + 4; }
  ADAPMIXED_HD std::int64_t shared_bytes() const {
    return (3 * 4 + 8) * tile +
           models * (4 * pitch() + static_cast<std::int64_t>(sizeof(FloatModel)));
  }
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossLayout layout;
  double* sums;  // (positions, chunks, per_chunk)
  double *loss, *balance;
  std::int64_t first;  // position of this launch
  int num_orders;
  double orders[kMaxOrders];

  __device__ double* chunk_sums(std::int64_t member, std::int64_t chunk) const {
    return sums + (member * layout.chunks + chunk) * layout.per_chunk;
  }
  __device__ const ChunkHeader& header(std::int64_t member, std::int64_t chunk) const {
    return *reinterpret_cast<const ChunkHeader*>(chunk_sums(member, chunk));
  }
  // Numbers of the same kind lie together, after the header.
  __device__ ModelSums model_sums(double* of_chunk, std::int64_t i) const {
    return {of_chunk + LossLayout::kHeader + i, all.models, num_orders};
  }
};

// What the weights and log-sum-exps of a position say. A whole block must call this together.
struct LossFacts {
  double mean_weight, largest_weight, ratio_error;
  bool admissible;
  MomentChoice moments;

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
    moments = call.all.moments(largest_weight);
  }
  __device__ FloatErrors errors(const Neighbours& all) const {
    return {all, largest_weight, mean_weight, ratio_error};
  }
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

// A tile in the shared memory of a block. A whole block must call the constructor together.
template <Dtype D>
class Tile {
 public:
  const LossCall& call;
  const std::int64_t position;
  const LossFacts facts;
  TileTokens* tokens;  // in fours
  double* mixture;     // p of the tokens
  float* deviations;   // (models of the group, pitch)

  __device__ Tile(const LossCall& of, std::int64_t at)
      : call(of), position(at), facts(of, at), models_(dynamic_shared<FloatModel>()) {
    tokens = reinterpret_cast<TileTokens*>(models_ + of.layout.models);
    mixture = reinterpret_cast<double*>(tokens + of.layout.tile / 4);
    deviations = reinterpret_cast<float*>(mixture + of.layout.tile);
    if (!facts.admissible) sums_.growth = HUGE_VALF;
  }

  __device__ TileToken load_public(std::int64_t start) {
    TileToken token{};
    token.v = start + threadIdx.x;
    if (!in_tile() || token.v >= call.in.shape.vocab) return token;
    token.z0 = logit<D>(row_bits<D>(call.in.public_logits, 0, position), token.v);
    const double log_q = token.z0 - public_lse();
    token.counted = !(log_q <= kMaskedLog);
    if (!token.counted && !masked_by_all(call.in, call.weights, position, token.v)) {
      sums_.growth = HUGE_VALF;
    }
    if (!token.counted) return token;
    token.q = exp_(vmax(kRarest, log_q));
    token.exact = call.all.in_double || !(token.q >= kLeastFloatQ);
    token.a = split_token(token.z0 - static_cast<float>(centre_of(public_lse())));
    return token;
  }

  // Writes the deviations of a group of models at this thread's token, if it is not exact. A whole
  // block must call this together.
  __device__ Deviations add_group(int first, const TileToken& token) {
    const int count = end_of(first) - first;
    __syncthreads();  // the last group's constants have been read
    for (int j = static_cast<int>(threadIdx.x); j < count; j += kLossThreads) {
      const std::int64_t at = (first + j) * call.in.shape.positions + position;
      const double lse = call.in.private_lse[at], weight = call.weights.weight[at];
      const FloatShift shift =
          make_shift(lse - centre_of(lse), public_lse() - centre_of(public_lse()));
      models_[j] = {shift.c, static_cast<float>(centre_of(lse)),
                    static_cast<float>(weight * (1.0 + shift.residual)),
                    static_cast<float>(weight * shift.residual)};
    }
    __syncthreads();
    Deviations found;
    if (!token.counted || token.exact) return found;
    float* column = deviations + threadIdx.x;
    const int pitch = call.layout.pitch();
    const auto* at = row_bits<D>(call.in.private_logits, first, position) + token.v;
    const std::int64_t stride = call.in.private_logits.stride_model;
    typename Bits<D>::type next[kModelsAtOnce] = {};
    const auto load = [&](int left) {
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) {
        if (g < left) next[g] = at[g * stride];
      }
      at += kModelsAtOnce * stride;
    };
    load(count);
#pragma unroll 1
    for (int j = 0; j < count; j += kModelsAtOnce) {
      float e[kModelsAtOnce];
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) e[g] = float_of<D>(next[g]);
      load(count - j - kModelsAtOnce);  // on their way while these are computed
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) {
        e[g] = j + g < count ? deviation(models_[j + g], e[g], token.a) : 0.0f;
        if (j + g < count) column[(j + g) * pitch] = e[g];
        found.largest = std::fmax(found.largest, std::fabs(e[g]));
      }
      found.total +=
          static_cast<double>(((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7])));
    }
    return found;
  }

  // Computes what all models share at this thread's token. Returns whether some |t| may exceed 1.
  __device__ bool finish(TileToken& token, const Deviations& found) {
    if (!in_tile()) return false;
    if (!token.counted) {
      set(0.0, 0.0, 0.0);
      return false;
    }
    if (!token.exact) {
      const double largest = found.largest;
      const FloatMixture<double> of =
          float_mixture(call.all, token.q, found.total, largest, facts.mean_weight);
      token.exact = of.fails;
      if (!token.exact) {
        const double factor = of.factor / facts.moments.reach, middle = of.middle * factor;
        sums_.mass += of.p;
        sums_.balance += token.q * of.mean;
        sums_.common += of.p * of.shared * of.shared;
        sums_.most_common = std::fmax(sums_.most_common, rounded_up(of.shared));
        sums_.growth = std::fmax(sums_.growth, rounded_up(of.growth));
        set(middle, factor, of.p);
        return !(largest * factor + std::fabs(middle) <= 1.0);
      }
    }
    bool answered = false, unbounded;
    const auto answers = [&](std::int64_t i) { return answer(i, token, answered); };
    const double log_q = token.z0 - public_lse();
    const MixtureToken<double> exact =
        load_token(call.all, token.q, log_q, answers, answered, unbounded);
    if (unbounded) sums_.growth = HUGE_VALF;
    token.mean = exact.mean;
    sums_.mass += exact.p;
    sums_.balance += token.q * token.mean.excess;
    set(0.0, -1.0, exact.p);
    return true;
  }

  // Writes x as it is kept, divided by the reach, for a group of models at this thread's token, if
  // it is exact, and 0 if it does not count.
  __device__ void write_exact(int first, const TileToken& token) const {
    if (!in_tile() || (token.counted && !token.exact)) return;
    float* column = deviations + threadIdx.x;
    const MixtureToken<double> exact = mixture_token(call.all, token.q, token.mean);
    bool answered = false;
    const auto answers = [&](std::int64_t i) { return answer(i, token, answered); };
#pragma unroll 1
    for (int i = first; i < end_of(first); ++i, column += call.layout.pitch()) {
      const double x = token.counted ? kept_neighbour(call.all, exact, i, answers) : 0.0;
      *column = static_cast<float>(x / facts.moments.reach);
    }
  }

  // The end of the group of models that begins with `first`.
  __device__ int end_of(int first) const {
    const int models = static_cast<int>(call.all.models);
    return models - first < call.layout.models ? models : first + call.layout.models;
  }

  // Stores the sums over all tiles of the block. A whole block must call this together.
  __device__ void store(double* out) const {
    double totals[3] = {sums_.mass, sums_.balance, sums_.common};
    double most[2] = {sums_.most_common, sums_.growth};
    block_reduce(totals, Add{});
    block_reduce(most, Max{});
    if (threadIdx.x != 0) return;
    const TokenSums tokens{totals[1], totals[2], most[0], most[1]};
    *reinterpret_cast<ChunkHeader*>(out) = {totals[0], tokens,
                                            static_cast<double>(facts.moments.degree)};
  }

 private:
  __device__ double public_lse() const { return call.in.public_lse[position]; }
  __device__ bool in_tile() const { return static_cast<int>(threadIdx.x) < call.layout.tile; }

  // With p/q kept above e^-25.
  __device__ static float deviation(const FloatModel& model, float z, const FloatToken& token) {
    const float a = token.grid + model.c;
    const float lowest = vfma(a, 1.0f / kOctavesPerNat, -25.0f);
    return vfma(ratio_excess(at_least(lowest, z - model.centre), a, token.rest), model.slope,
                model.offset);
  }

  __device__ Projected<double> answer(std::int64_t model, const TileToken& token,
                                      bool& answered) const {
    const double z = logit<D>(row_bits<D>(call.in.private_logits, model, position), token.v);
    const double z0 = token.z0;
    return answer_of(call.in, call.weights, model, position, z, z0, answered);
  }

  __device__ void set(double middle, double factor, double p) const {
    const int thread = static_cast<int>(threadIdx.x);
    TileTokens& four = tokens[thread / 4];
    four.middle.v[thread % 4] = static_cast<float>(middle);
    four.factor.v[thread % 4] = static_cast<float>(factor);
    four.p.v[thread % 4] = static_cast<float>(p);
    mixture[thread] = p;
  }

  FloatModel* models_;  // of the group
  ThreadSums sums_;
};

ADAPMIXED_CORE_END
