// The single-precision sums of a chunk, tile by tile. First each thread forms the deviations of all
// models at its token and reads the logits once. Then each warp takes 32 models, one per lane, and
// goes through the tokens, so nothing is added across lanes. cuda_float_exact.cuh sums the tokens
// that floats leave out.
#pragma once

#include "leave_one_out/cuda_float_exact.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kModelsAtOnce = 8;  // their deviations are added in floats

// The findings of one thread about the tokens it reads.
struct TokenFindings {
  TokenSums sums;
  bool failed = false;
};

// The deviations of all models at one token.
struct Deviations {
  double total = 0.0;
  float low = HUGE_VALF, high = -HUGE_VALF;

  __device__ void include(float e) {
    low = std::fmin(low, e);  // NaN changes nothing
    high = std::fmax(high, e);
  }
};

// Writes delta_i - base of a few models with logits z at one token to `column`, a pitch apart, and
// returns their sum. `kWhole`: all of them exist.
template <bool kWhole>
__device__ double add_deviations(const FloatModel* models, int count, const float* z, float a_grid,
                                 float a_rest, float* column, int pitch, Deviations& found) {
  float e[kModelsAtOnce];
#pragma unroll
  for (int g = 0; g < kModelsAtOnce; ++g) {
    e[g] = 0.0f;
    if (!kWhole && g >= count) continue;
    const FloatModel model = models[g];
    const FloatShift shift{model.c, model.lowest, 0.0};
    e[g] = vfma(ratio_excess(z[g], a_grid, a_rest, shift), model.slope, model.offset);
    column[g * pitch] = e[g];
    found.include(e[g]);
  }
  return static_cast<double>(((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7])));
}

template <Dtype D>
__device__ Deviations float_deviations(const LossCall& call, const FloatModel* models,
                                       std::int64_t position, std::int64_t v, double z0,
                                       float* column, int pitch) {
  const double a = z0 * static_cast<double>(kOctavesPerNat), grid = on_grid(a);
  const auto a_grid = static_cast<float>(grid), a_rest = static_cast<float>(a - grid);
  const auto* at = row_bits<D>(call.in.private_logits, 0, position) + v;
  const std::int64_t stride = call.in.private_logits.stride_model;
  typename Bits<D>::type next[kModelsAtOnce] = {};
  const auto load = [&](int count) {
    if (count >= kModelsAtOnce) {
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g, at += stride) next[g] = __ldg(at);
    } else {
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) {
        if (g < count) next[g] = at[g * stride];
      }
    }
  };
  int left = static_cast<int>(call.in.shape.models);
  Deviations found;
  float z[kModelsAtOnce];
  load(left);
#pragma unroll 1
  for (; left >= kModelsAtOnce; left -= kModelsAtOnce) {
#pragma unroll
    for (int g = 0; g < kModelsAtOnce; ++g) z[g] = float_of<D>(next[g]);
    load(left - kModelsAtOnce);  // on their way while these are added
    found.total += add_deviations<true>(models, left, z, a_grid, a_rest, column, pitch, found);
    models += kModelsAtOnce;
    column += kModelsAtOnce * pitch;
  }
#pragma unroll
  for (int g = 0; g < kModelsAtOnce; ++g) z[g] = float_of<D>(next[g]);
  if (left > 0) {
    found.total += add_deviations<false>(models, left, z, a_grid, a_rest, column, pitch, found);
  }
  return found;
}

template <Dtype D>
__device__ Deviations double_deviations(const LossCall& call, int base_model, std::int64_t position,
                                        std::int64_t v, double z0, float* column, int pitch,
                                        double& base) {
  const auto delta = [&](std::int64_t i) {
    const ModelRow<D> row = model_row<D>(call.in, call.weights, i, position);
    return row.weight * ratio_excess(row.log_ratio(v, z0));
  };
  base = delta(base_model);
  Deviations found;
  for (std::int64_t i = 0; i < call.in.shape.models; ++i, column += pitch) {
    const double e = delta(i) - base;
    *column = static_cast<float>(e);
    found.include(*column);
    found.total += e;
  }
  return found;
}

// Returns whether some model would answer a token that the public row masks. NaN counts, too.
template <Dtype D>
__device__ bool any_private(const LossCall& call, std::int64_t position, std::int64_t v) {
  bool any = false;
  for (std::int64_t i = 0; i < call.in.shape.models; ++i) {
    const bool weighs = call.weights.weight[i * call.in.shape.positions + position] > 0.0;
    const float z = logit<D>(row_bits<D>(call.in.private_logits, i, position), v);
    any = any || (weighs && !(z == -HUGE_VALF));
  }
  return any;
}

// Reads token v and writes the models' deviations there to `column`. `for_all`: the token is to be
// summed in double for all models; `wide`: for those with |t| > 1.
template <Dtype D>
__device__ TileToken load_token(const LossCall& call, const FloatPosition& found, double reach,
                                std::int64_t position, std::int64_t v, const FloatModel* constants,
                                float* column, int pitch, TokenFindings& findings, bool& for_all,
                                bool& wide) {
  const int models = static_cast<int>(call.in.shape.models);
  const Neighbours& all = call.all;
  const float z0 = v < call.in.shape.vocab
                       ? logit<D>(row_bits<D>(call.in.public_logits, 0, position), v)
                       : -HUGE_VALF;
  const double lq = z0 - call.in.public_lse[position];
  if (!(lq >= kFloatLogQ)) {
    if (z0 == -HUGE_VALF) {
      if (v < call.in.shape.vocab && any_private<D>(call, position, v)) findings.failed = true;
    } else if (lq >= kWildLogQ) {
      for_all = true;
    } else {
      findings.failed = true;  // too rare, or NaN
    }
    for (int i = 0; i < models; ++i) column[i * pitch] = 0.0f;
    return {};
  }
  double base = 0.0;
  const Deviations own =
      found.precision.in_double
          ? double_deviations<D>(call, found.base_model, position, v, z0, column, pitch, base)
          : float_deviations<D>(call, constants, position, v, z0, column, pitch);
  const double others = own.total / all.slots;
  const double mean = vfma(base, models / all.slots, others);
  const double middle = all.against_public ? -base : others - base * (all.absent / all.slots);
  const double q = exp_(lq), ratio = 1.0 + mean;
  if (!(ratio >= least_ratio(found.precision.in_double))) {
    for_all = true;  // the mixture is far below q, so 1 + mean cancels too much
    findings.failed = findings.failed || mean != mean;
    return {};  // all t are 0, as the deviations are finite unless this position fails
  }
  const double relative = 1.0 / (ratio * (all.against_public ? all.slots : all.slots - 1.0));
  const double p = q * ratio, part = mean * relative, distance = middle * relative;
  findings.sums.add({q * mean, p * part * part, p * distance * distance,
                     (mean + 2.0 * found.mean_weight) / ratio, 0.0});
  const TileToken token{static_cast<float>(middle), static_cast<float>(relative / reach),
                        static_cast<float>(p)};
  // Rounding keeps order, so no t lies outside those of the extremes.
  wide = !(std::fabs(token.t(own.low)) <= 1.0f && std::fabs(token.t(own.high)) <= 1.0f);
  return token;
}

// Adds p t^{1+k} to s[k], with at most 1 + k roundings (leave_one_out/bound.h).
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

constexpr int kBurst = 16;  // tokens whose terms are added in floats

// Adds up a burst. `kWide`: some |t| may exceed 1, and those terms are left out.
template <bool kWide, int kCount>
__device__ void add_burst(const TileMemory& tile, const float* deviations, int start,
                          float (&s)[kCount]) {
#pragma unroll 2
  for (int lane = start; lane < start + kBurst; lane += 4) {
    const Four e = four_at(deviations + lane);
    const Four middle = four_at(tile.middle + lane), factor = four_at(tile.factor + lane);
    const Four p = four_at(tile.p + lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float t = TileToken{middle.v[j], factor.v[j], p.v[j]}.t(e.v[j]);
      if (kWide) t = std::fabs(t) <= 1.0f ? t : 0.0f;
      add_powers(p.v[j], t, s);
    }
  }
}

// Adds the moments of one model over the tile to its sums. `fresh`: this is the first tile, and the
// sums are written, not added to.
template <int kDegree>
__device__ void add_moments(const TileMemory& tile, const float* deviations, int count,
                            double reach, bool fresh, double* sums) {
  double total[kDegree + 1] = {};
#pragma unroll 1
  for (int start = 0; start < count; start += kBurst) {
    float s[kDegree + 1] = {};
    if ((tile.wide[start / 32] >> start % 32 & 0xffffu) == 0) {  // the same for all lanes
      add_burst<false>(tile, deviations, start, s);
    } else {
      add_burst<true>(tile, deviations, start, s);
    }
#pragma unroll
    for (int k = 0; k <= kDegree; ++k) total[k] += static_cast<double>(s[k]);
  }
  const ModelSums out{sums, kDegree};
  const auto add = [fresh](double& to, double value) { to = fresh ? value : to + value; };
  add(out.first(), total[0] * reach);
  if (fresh) out.listed_second() = 0.0;
#pragma unroll
  for (int k = 0; k < kDegree; ++k) add(out.moments()[k], total[1 + k]);
}

// A whole block must call this together; each lane takes one model.
__device__ inline void add_all_moments(const LossCall& call, const FloatLayout& layout,
                                       const TileMemory& tile, int degree, double reach, bool fresh,
                                       double* sums) {
  const int count = static_cast<int>(layout.tile), models = static_cast<int>(call.in.shape.models);
  for (int i = static_cast<int>(threadIdx.x); i < models; i += kFloatThreads) {
    const float* own = tile.deviations + i * layout.pitch();
    double* out = sums + i * layout.per_model;
    if (degree == 4) {
      add_moments<4>(tile, own, count, reach, fresh, out);
    } else if (degree == 6) {
      add_moments<6>(tile, own, count, reach, fresh, out);
    } else if (degree == 10) {
      add_moments<10>(tile, own, count, reach, fresh, out);
    } else {
      add_moments<kMaxMoments>(tile, own, count, reach, fresh, out);
    }
    for (int k = 0; fresh && k < call.orders.count; ++k) {
      ModelSums{out, degree}.listed(k) = {0.0, 0.0, 0.0, 0.0};
    }
  }
}

// Adds the tile at `begin` to the chunk's sums. Returns whether floats serve there. A whole block
// must call this together.
template <Dtype D>
__device__ bool add_tile(const LossCall& call, const FloatCall& floats, std::int64_t member,
                         std::int64_t begin, bool fresh, double* sums) {
  __shared__ std::uint32_t wide[kMostTile / 32], for_all[kMostTile / 32];
  const FloatPosition found = floats.positions[member];
  const FloatLayout& layout = floats.layout;
  const int degree = degree_at(found.degree), pitch = layout.pitch();
  const double reach = moment_reach(call.all.largest_order, degree);
  const int thread = static_cast<int>(threadIdx.x), models = static_cast<int>(call.in.shape.models);
  const TileMemory tile(layout, models, wide);
  for (int i = thread; i < models; i += kFloatThreads) {
    tile.models[i] = floats.models[member * models + i];
  }
  __syncthreads();
  TokenFindings findings;
  bool own_wide = false, own_for_all = false;
  if (thread < layout.tile) {
    const TileToken token =
        load_token<D>(call, found, reach, call.first + member, begin + thread, tile.models,
                      tile.deviations + thread, pitch, findings, own_for_all, own_wide);
    tile.middle[thread] = token.middle;
    tile.factor[thread] = token.factor;
    tile.p[thread] = token.p;
  }
  const unsigned any_wide = __ballot_sync(kAllLanes, own_wide);
  const unsigned any_for_all = __ballot_sync(kAllLanes, own_for_all);
  if (lane_id() == 0) {
    wide[warp_id()] = any_wide;
    for_all[warp_id()] = any_for_all;
  }
  __syncthreads();
  add_all_moments(call, layout, tile, degree, reach, fresh, sums);
  double found_sums[3] = {findings.sums.balance, findings.sums.common, findings.sums.middle};
  block_sum(found_sums);
  const double growth = block_max(findings.sums.growth);
  bool served = __syncthreads_or(findings.failed) == 0;
  const double balance =
      add_exact_tokens<D>(call, floats, member, begin, tile, for_all, sums, served);
  if (thread == 0) {
    // In the workspace, not in registers: the loop over tiles has none to spare.
    double* out = sums + models * layout.per_model;
    if (fresh) out[0] = out[1] = out[2] = out[3] = 0.0;
    out[0] += found_sums[0] + balance;
    out[1] += found_sums[1];
    out[2] += found_sums[2];
    out[3] = std::fmax(out[3], growth);
  }
  return served;
}

// One block per chunk.
template <Dtype D>
__global__ void __launch_bounds__(kFloatThreads, 2)
    float_sums_kernel(const __grid_constant__ LossCall call,
                      const __grid_constant__ FloatCall floats) {
  const std::int64_t member = blockIdx.x / floats.layout.chunks;
  if (block_flag(&call.states[member].failed)) return;  // other chunks of the position raise it
  const std::int64_t chunk = blockIdx.x % floats.layout.chunks;
  double* sums = float_sums(call, floats, member, chunk);
  std::int64_t begin = chunk * floats.layout.chunk_length;
  const int tiles = static_cast<int>(floats.layout.chunk_length / floats.layout.tile);
  for (int k = 0; k < tiles && begin < call.in.shape.vocab; ++k) {
    if (k > 0) __syncthreads();  // before the next tile overwrites this one
    if (!add_tile<D>(call, floats, member, begin, k == 0, sums)) {
      if (threadIdx.x == 0) atomicExch(&call.states[member].failed, 1);
      return;
    }
    begin += floats.layout.tile;
  }
}

ADAPMIXED_CORE_END
