// How the single-precision sums of leave_one_out divide the vocabulary, what a block of theirs
// keeps in shared memory, and what it leaves in the workspace.
//
// A block takes one tile of the vocabulary at one position, with the deviations of all models there
// in its shared memory. It adds the tile's sums to those of the position, whose bits do not depend
// on the order of the tiles (cuda_order_free.cuh).
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_bound.cuh"
#include "leave_one_out/cuda_layout.cuh"
#include "leave_one_out/cuda_order_free.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kFloatThreads = 128;  // and the most tokens of a tile
constexpr int kFloatWarps = kFloatThreads / kWarp;
// Blocks that a multiprocessor has room for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kFloatBlocks = 2;
#else
constexpr int kFloatBlocks = 4;
#endif
constexpr int kModelsAtOnce = 8;  // that a thread reads; their deviations are added in floats
// Dynamic shared memory with which kFloatBlocks have room, and the most that a block asks for: half
// as many have room then.
constexpr std::int64_t kFloatShared = 55 * 1024, kMostFloatShared = 111 * 1024;

// The constants with which one model's row is read (common/float_ratio.h).
struct alignas(16) FloatModel {
  float c, lowest, slope, offset;  // delta = slope (r' - 1) + offset
};

// The same for deviations in double: delta = weight (e^{z - z_0 - shift} - 1).
struct alignas(16) DoubleModel {
  double shift, weight;
  __device__ double delta(double z, double z0) const {
    return weight * ratio_excess(z - z0 - shift);
  }
};

// The numbers that all models share at a token which is summed in double.
struct ExactToken {
  int lane;  // in the tile
  double z0;
  MixtureToken<double> mixture;
};

// The numbers of a token that all threads read, and t = x / reach of a model there.
struct TileToken {
  float middle, factor, p;  // `middle` has been multiplied by the factor
  __device__ float t(float deviation) const { return vfma(-deviation, factor, middle); }
};

struct FloatLayout {
  int tile = 0;  // tokens, whole warps; 0 if so many models or tokens do not fit
  int tiles = 0;

  FloatLayout() = default;
  explicit FloatLayout(const Shape& shape) {
    for (tile = static_cast<int>(simulated_or(kFloatThreads, 64)); tile > kWarp; tile -= kWarp) {
      if (shared_bytes(shape.models) <= kFloatShared) break;
    }
    const bool fits = shared_bytes(shape.models) <= kMostFloatShared;
    if (!fits || shape.vocab > WideSum::kMostTerms) tile = 0;
    if (tile > 0) tiles = static_cast<int>((shape.vocab + tile - 1) / tile);
  }

  // 4 times an odd number: lanes that read four tokens of their own models use different banks.
  ADAPMIXED_HD int pitch() const { return tile + 4; }
  // A warp's width of listed tokens takes the place of the models' constants.
  ADAPMIXED_HD std::int64_t list_bytes(std::int64_t models) const {
    const std::int64_t list = kWarp * static_cast<std::int64_t>(sizeof(ExactToken));
    const std::int64_t constants = models * static_cast<std::int64_t>(sizeof(FloatModel));
    return list > constants ? list : constants;
  }
  ADAPMIXED_HD std::int64_t shared_bytes(std::int64_t models) const {
    return list_bytes(models) + 4 * (3 * tile + models * pitch());
  }
};

struct alignas(16) Four {
  float v[4];
};
__device__ inline Four four_at(const float* from) { return *reinterpret_cast<const Four*>(from); }

// Four tokens next to each other, as a lane reads them.
struct TileTokens {
  Four middle, factor, p;
  __device__ TileToken at(int k) const { return {middle.v[k], factor.v[k], p.v[k]}; }
  __device__ void set(int k, const TileToken& token) {
    middle.v[k] = token.middle, factor.v[k] = token.factor, p.v[k] = token.p;
  }
};

// The shared memory of a block of the sums.
struct TileMemory {
  // While the deviations are computed, the models' constants of either kind; afterwards, at the
  // same place, the list.
  FloatModel* models;
  DoubleModel* doubles;
  ExactToken* list;
  TileTokens* tokens;  // of the tile, in fours
  float* deviations;   // (N, pitch)

  __device__ TileMemory(const FloatLayout& layout, std::int64_t count)
      : models(dynamic_shared<FloatModel>()),
        doubles(dynamic_shared<DoubleModel>()),
        list(dynamic_shared<ExactToken>()) {
    tokens = reinterpret_cast<TileTokens*>(dynamic_shared<char>() + layout.list_bytes(count));
    deviations = reinterpret_cast<float*>(tokens + layout.tile / 4);
  }
  __device__ TileToken token(int lane) const { return tokens[lane / 4].at(lane % 4); }
};

// The sums of one position over its tokens. See TokenSums, which has all but the mass.
struct TokenTotals {
  WideSum mass;  // sum p
  WideSum balance, common, middle, float_common;
  Word growth, float_growth;

  ADAPMIXED_HD static std::int64_t words() {
    return static_cast<std::int64_t>(sizeof(TokenTotals) / sizeof(Word));
  }
};

// The excess of listed tokens at one order, and the larger of their slopes.
struct ListedTotals {
  WideSum excess[2];  // forward, reverse
  WideSum slope;
};

// A view of the sums of all models at one position: sums of p t^{1+k} (degree + 1, N) as
// fixed-point numbers, with room for the highest degree; and those of the listed tokens: p x and p
// x^2 (N) and the excesses (N, K).
struct ModelTotals {
  Word* fixed;
  WideSum *firsts, *seconds;
  ListedTotals* listed;
  std::int64_t models, orders;

  ADAPMIXED_HD static std::int64_t words(std::int64_t models, std::int64_t orders) {
    const auto size = static_cast<std::int64_t>(sizeof(WideSum) / sizeof(Word));
    return models * (1 + kMaxMoments + size * (2 + 3 * orders));
  }
  __device__ ModelTotals(Word* words, std::int64_t models_, std::int64_t orders_)
      : fixed(words), models(models_), orders(orders_) {
    firsts = reinterpret_cast<WideSum*>(fixed + models * (1 + kMaxMoments));
    seconds = firsts + models;
    listed = reinterpret_cast<ListedTotals*>(seconds + models);
  }

  __device__ double moment(std::int64_t model, int k) const {
    return fixed_value(fixed[(1 + k) * models + model]);
  }
  // sum p x. listed: its part from the listed tokens.
  __device__ double first(std::int64_t model, double reach, double listed) const {
    return fixed_value(fixed[model]) * reach + listed;
  }
  // sum p x^2, at least. error: that of a moment.
  __device__ double second(std::int64_t model, double reach, double error) const {
    return reach * reach * (moment(model, 0) + error) + seconds[model].value();
  }
};

// The moments of one model, as LossBound reads them: in shared memory, next to those of the block's
// other models.
struct FixedMoments {
  struct View {
    const double* from;
    __device__ double operator[](int k) const { return from[k * kFloatThreads]; }
  };
  View view;
  double error;  // of a moment, from its rounding to a multiple of kFixedUnit

  __device__ View moments() const { return view; }
  __device__ double moment_error() const { return error; }
};

ADAPMIXED_CORE_END
