// The single-precision sums of a chunk, tile by tile. First each thread forms the deviations of all
// models at its token and reads the logits once. Then each warp takes 32 models, one per lane, and
// goes through the tokens, so nothing is added across lanes. cuda_float_exact.cuh sums the tokens
// that floats leave out.
#pragma once

#include "leave_one_out/cuda_float_exact.cuh"

ADAPMIXED_CORE_BEGIN

// The findings of one thread about the tokens it reads.
struct TokenFindings {
  TokenSums sums;
  bool failed = false;
};

// Writes delta_i - base of all models at one token to `column`, a pitch apart, and returns their
// sum.
template <Dtype D>
__device__ double float_deviations(const LossCall& call, const FloatModel* models,
                                   std::int64_t position, std::int64_t v, double z0, float* column,
                                   std::int64_t pitch) {
  const double a = z0 * static_cast<double>(kOctavesPerNat), grid = on_grid(a);
  const auto a_grid = static_cast<float>(grid), a_rest = static_cast<float>(a - grid);
  constexpr int kAtOnce = 8;  // models whose deviations are added in floats
  double total = 0.0;
  for (std::int64_t first = 0; first < call.in.shape.models; first += kAtOnce) {
    float z[kAtOnce], e[kAtOnce];
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) {
      const std::int64_t i = first + g;
      if (i < call.in.shape.models)
        z[g] = logit<D>(row_bits<D>(call.in.private_logits, i, position), v);
    }
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) {
      const std::int64_t i = first + g;
      e[g] = 0.0f;
      if (i >= call.in.shape.models) continue;
      const FloatModel model = models[i];
      const FloatShift shift{model.c, model.lowest, 0.0};
      e[g] = vfma(ratio_excess(z[g], a_grid, a_rest, shift), model.slope, model.offset);
      column[i * pitch] = e[g];
    }
    total += static_cast<double>(((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7])));
  }
  return total;
}
template <Dtype D>
__device__ double double_deviations(const LossCall& call, int base_model, std::int64_t position,
                                    std::int64_t v, double z0, float* column, std::int64_t pitch,
                                    double& base) {
  const auto delta = [&](std::int64_t i) {
    const ModelRow<D> row = model_row<D>(call.in, call.weights, i, position);
    return row.weight * ratio_excess(row.log_ratio(v, z0));
  };
  base = delta(base_model);
  double total = 0.0;
  for (std::int64_t i = 0; i < call.in.shape.models; ++i) {
    const double e = delta(i) - base;
    column[i * pitch] = static_cast<float>(e);
    total += e;
  }
  return total;
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

// Reads token v and writes the models' deviations there to `column`. `exact`: the token is to be
// summed in double for all models.
template <Dtype D>
__device__ TileToken load_token(const LossCall& call, const FloatCall& floats,
                                const FloatPosition& found, double reach, std::int64_t member,
                                std::int64_t v, float* column, TokenFindings& findings,
                                bool& exact) {
  exact = false;
  if (v >= call.in.shape.vocab) return {};
  const std::int64_t position = call.first + member, models = call.in.shape.models;
  const float z0 = logit<D>(row_bits<D>(call.in.public_logits, 0, position), v);
  const double lq = z0 - call.in.public_lse[position];
  if (!(lq >= kFloatLogQ)) {
    if (z0 == -HUGE_VALF) {
      findings.failed = findings.failed || any_private<D>(call, position, v);
    } else if (lq >= kWildLogQ) {
      exact = true;
    } else {
      findings.failed = true;  // too rare, or NaN
    }
    return {};
  }
  const std::int64_t pitch = floats.layout.pitch();
  double base = 0.0;
  const double total =
      found.precision.in_double
          ? double_deviations<D>(call, found.base_model, position, v, z0, column, pitch, base)
          : float_deviations<D>(call, floats.models + member * models, position, v, z0, column,
                                pitch);
  const Neighbours& all = call.all;
  const double others = total / all.slots;
  const double mean = vfma(base, static_cast<double>(models) / all.slots, others);
  const double middle = all.against_public ? -base : others - base * (all.absent / all.slots);
  const double q = exp_(lq), ratio = 1.0 + mean;
  if (!(ratio >= least_ratio(found.precision.in_double))) {
    exact = true;  // the mixture is far below q, so 1 + mean cancels too much
    findings.failed = findings.failed || mean != mean;
    return {};
  }
  const double relative = 1.0 / (ratio * (all.against_public ? all.slots : all.slots - 1.0));
  const double p = q * ratio, part = mean * relative, distance = middle * relative;
  findings.sums.add({q * mean, p * part * part, p * distance * distance,
                     (mean + 2.0 * found.mean_weight) / ratio, 0.0});
  return {static_cast<float>(middle), static_cast<float>(relative / reach), static_cast<float>(p)};
}

// Adds the moments of one model over the tile to its sums, and marks the tokens with |t| > 1.
// `fresh`: this is the first tile, and the sums are written, not added to.
template <int kDegree>
__device__ void add_moments(const float* deviations, const TileToken* tokens, int count,
                            double reach, bool fresh, std::uint32_t* exact, double* sums) {
  constexpr int kBurst = 16;  // tokens whose terms are added in floats
  double total[kDegree + 1] = {};
  for (int start = 0; start < count; start += kBurst) {
    float s[kDegree + 1] = {};
#pragma unroll 4
    for (int lane = start; lane < start + kBurst; ++lane) {
      const TileToken token = tokens[lane];
      float p = token.p, t = (token.middle - deviations[lane]) * token.factor;
      if (t * t > 1.0f) {
        if (p > 0.0f) atomicOr(&exact[lane / 32], 1u << lane % 32);
        p = t = 0.0f;
      }
      const float square = t * t;
      s[0] = vfma(p, t, s[0]);
      float power = p * square;
#pragma unroll
      for (int k = 1; k <= kDegree; k += 2) {
        s[k] = s[k] + power;
        if (k + 1 <= kDegree) s[k + 1] = vfma(power, t, s[k + 1]);
        if (k + 2 <= kDegree) power = power * square;
      }
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
__device__ inline void add_all_moments(const LossCall& call, const FloatLayout& layout, int degree,
                                       double reach, bool fresh, const float* deviations,
                                       const TileToken* tokens, std::uint32_t* exact,
                                       double* sums) {
  const int count = static_cast<int>(layout.tile);
  for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
    const float* own = deviations + i * layout.pitch();
    double* out = sums + i * layout.per_model;
    if (degree == 4) {
      add_moments<4>(own, tokens, count, reach, fresh, exact, out);
    } else if (degree == 6) {
      add_moments<6>(own, tokens, count, reach, fresh, exact, out);
    } else if (degree == 10) {
      add_moments<10>(own, tokens, count, reach, fresh, exact, out);
    } else {
      add_moments<kMaxMoments>(own, tokens, count, reach, fresh, exact, out);
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
  __shared__ std::uint32_t exact[kMostTile / 32], exact_for_all[kMostTile / 32];
  const FloatPosition found = floats.positions[member];
  const int degree = degree_at(found.degree), width = static_cast<int>(floats.layout.tile);
  const double reach = moment_reach(call.all.largest_order, degree);
  auto* list = dynamic_shared<ExactToken>();
  auto* tokens = reinterpret_cast<TileToken*>(list + kMostTile);
  auto* deviations = reinterpret_cast<float*>(tokens + width);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMostTile / 32) exact[thread] = exact_for_all[thread] = 0;
  __syncthreads();
  TokenFindings findings;
  if (thread < width) {
    for (std::int64_t i = 0; i < call.in.shape.models; ++i) {
      deviations[i * floats.layout.pitch() + thread] = 0.0f;
    }
    bool for_all = false;
    // Via a local variable: ThreadSanitizer misses a return directly into shared memory (g++ 12).
    const TileToken token = load_token<D>(call, floats, found, reach, member, begin + thread,
                                          deviations + thread, findings, for_all);
    tokens[thread] = token;
    if (for_all) atomicOr(&exact_for_all[thread / 32], 1u << thread % 32);
  }
  __syncthreads();
  add_all_moments(call, floats.layout, degree, reach, fresh, deviations, tokens, exact, sums);
  double found_sums[4] = {findings.sums.balance, findings.sums.common, findings.sums.middle,
                          findings.failed ? 1.0 : 0.0};
  block_sum(found_sums);
  const double growth = block_max(findings.sums.growth);
  bool served = found_sums[3] == 0.0;
  const double balance = add_exact_tokens<D>(call, floats, member, begin, exact, exact_for_all,
                                             list, tokens, deviations, sums, served);
  if (threadIdx.x == 0) {
    // In the workspace, not in registers: the loop over tiles has none to spare.
    double* out = sums + call.in.shape.models * floats.layout.per_model;
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
