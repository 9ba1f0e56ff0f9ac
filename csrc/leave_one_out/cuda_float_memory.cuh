// How the single-precision sums of leave_one_out divide the vocabulary, and what a block of theirs
// keeps in shared memory.
//
// A block takes a chunk of the vocabulary tile by tile, with the deviations of all models at a tile
// in its shared memory. It leaves the models' sums in the workspace; the kernel in double
// overwrites them if it runs. A chunk is one tile, unless the sums of all tiles of a row do not fit
// the workspace.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/bound.h"
#include "leave_one_out/cuda_layout.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kFloatThreads = 256;
constexpr int kMostTile = 256;
constexpr int kModelsAtOnce = 8;  // that a thread reads; their deviations are added in floats
// Two such blocks fit a multiprocessor of sm_90 and later, one fits that of sm_80. Smaller
// architectures use the double-precision kernels alone.
constexpr std::int64_t kFloatShared = 112 * 1024;

// TokenSums without `rough`, as all listed tokens are in double: four sums, then two maxima.
constexpr int kTokenSums = 6;
constexpr int kTokenMaxima = 2;

// The constants with which one model's row is read (common/float_ratio.h).
struct alignas(16) FloatModel {
  float c, lowest, slope, offset;  // delta = slope (r' - 1) + offset
};

// The same for deviations in double: delta = weight (e^{z - z_0 - shift} - 1).
struct alignas(16) DoubleModel {
  double shift, weight;
};

// The numbers that all models share at a token which is summed in double.
struct ExactToken {
  int lane;      // index in the tile
  bool for_all;  // else only for models with |t| > 1
  double z0, balance;
  MixtureToken<double> mixture;
};

// The numbers of a token that all threads read, and t = x / reach of a model there.
struct TileToken {
  float middle, factor, p;
  __device__ float t(float deviation) const { return (middle - deviation) * factor; }
};

struct FloatLayout : LossLayout {
  std::int64_t per_model = 0;  // doubles; per_chunk has those of all models, then TokenSums

  FloatLayout() = default;
  // `group` is 0 if the deviations of so many models do not fit.
  FloatLayout(const Shape& shape, std::int64_t orders) {
    tile = simulated_or(kMostTile, 64);
    while (tile > 0 && kStaticShared + shared_bytes(shape.models) > kFloatShared) tile -= kWarp;
    if (tile == 0) return;
    const std::int64_t own = ModelSums::size(kMaxMoments, orders);
    static_cast<LossLayout&>(*this) = {shape, tile, shape.models * own + kTokenSums,
                                       simulated_or(kLossMemory, 3)};
    per_model = own;
  }

  // 4 times an odd number: lanes that read four tokens of their own models use different banks.
  ADAPMIXED_HD int pitch() const { return static_cast<int>(tile) + 4; }
  // The list takes the place of the models' constants.
  ADAPMIXED_HD std::int64_t list_bytes(std::int64_t models) const {
    const std::int64_t list = tile * static_cast<std::int64_t>(sizeof(ExactToken));
    const std::int64_t constants = models * static_cast<std::int64_t>(sizeof(FloatModel));
    return list > constants ? list : constants;
  }
  ADAPMIXED_HD std::int64_t shared_bytes(std::int64_t models) const {
    return list_bytes(models) + 4 * (3 * tile + models * pitch());
  }

 private:
  static constexpr std::int64_t kStaticShared = 2048;  // more than the kernel's static memory
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
  TileTokens* tokens;         // of the tile, in fours
  float* deviations;          // (N, pitch)
  const std::uint32_t* wide;  // bits of tokens at which some |t| may exceed 1

  __device__ TileMemory(const FloatLayout& layout, std::int64_t count, const std::uint32_t* bits)
      : models(dynamic_shared<FloatModel>()),
        doubles(dynamic_shared<DoubleModel>()),
        list(dynamic_shared<ExactToken>()),
        wide(bits) {
    tokens = reinterpret_cast<TileTokens*>(dynamic_shared<char>() + layout.list_bytes(count));
    deviations = reinterpret_cast<float*>(tokens + layout.tile / 4);
  }
  __device__ TileToken token(int lane) const { return tokens[lane / 4].at(lane % 4); }
};

ADAPMIXED_CORE_END
