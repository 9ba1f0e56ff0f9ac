// The deviations delta_i - base of all models at the tokens of a tile, a thread a token. base is 0,
// and deviations are computed in floats. If the models share more than they differ by, base is
// delta of one model, and deviations are computed in double and rounded.
#pragma once

#include "leave_one_out/cuda_call.cuh"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

// The deviations of all models at one token: their sum, that of their squares, and the largest of
// their sizes.
struct Deviations {
  double total = 0.0;
  float squares = 0.0f, largest = 0.0f;

  __device__ void include(float e) {
    squares = vfma(e, e, squares);
    largest = std::fmax(largest, std::fabs(e));  // but for NaN
  }
};

// Writes delta_i of a few models with logits z at one token to `column`, a pitch apart, and returns
// their sum. `kWhole`: all of them exist.
template <bool kWhole>
__device__ double add_deviations(const FloatModel* models, int count, const float* z, float a_grid,
                                 float a_rest, float* column, int pitch, Deviations& found) {
  constexpr int kTogether = 2;  // models whose chains of operations overlap
  float e[kModelsAtOnce] = {};
#pragma unroll
  for (int first = 0; first < kModelsAtOnce; first += kTogether) {
    if (!kWhole && first >= count) continue;
    FloatModel model[kTogether] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (kWhole || first + j < count) model[j] = models[first + j];
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const FloatShift shift{model[j].c, model[j].lowest, 0.0};
      e[first + j] = ratio_excess(z[first + j], a_grid, a_rest, shift);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int g = first + j;
      e[g] = kWhole || g < count ? vfma(e[g], model[j].slope, model[j].offset) : 0.0f;
      if (kWhole || g < count) column[g * pitch] = e[g];
      found.include(e[g]);
    }
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
  typename Bits<D>::type next[kModelsAtOnce];
  const auto load = [&] {
#pragma unroll
    for (int g = 0; g < kModelsAtOnce; ++g, at += stride) next[g] = __ldg(at);
  };
  Deviations found;
  float z[kModelsAtOnce] = {};
  const auto add = [&](bool last) {
#pragma unroll
    for (int g = 0; g < kModelsAtOnce; ++g) z[g] = float_of<D>(next[g]);
    if (!last) load();  // on their way while these are added
    found.total +=
        add_deviations<true>(models, kModelsAtOnce, z, a_grid, a_rest, column, pitch, found);
    models += kModelsAtOnce;
    column += kModelsAtOnce * pitch;
  };
  const int count = static_cast<int>(call.in.shape.models), left = count % kModelsAtOnce;
  if (count >= kModelsAtOnce) {
    load();
#pragma unroll 1
    for (int k = 2 * kModelsAtOnce; k <= count; k += kModelsAtOnce) add(false);
    add(true);
  }
  if (left > 0) {
#pragma unroll
    for (int g = 0; g < kModelsAtOnce; ++g) {
      if (g < left) z[g] = float_of<D>(at[g * stride]);
    }
    found.total += add_deviations<false>(models, left, z, a_grid, a_rest, column, pitch, found);
  }
  return found;
}

template <Dtype D>
__device__ Deviations double_deviations(const LossCall& call, const DoubleModel* models,
                                        int base_model, std::int64_t position, std::int64_t v,
                                        double z0, float* column, int pitch, double& base) {
  const auto* at = row_bits<D>(call.in.private_logits, 0, position) + v;
  const std::int64_t stride = call.in.private_logits.stride_model;
  base = models[base_model].delta(float_of<D>(at[base_model * stride]), z0);
  constexpr int kAtOnce = 4;
  const int count = static_cast<int>(call.in.shape.models);
  Deviations found;
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce, at += kAtOnce * stride) {
    float z[kAtOnce];
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g) {
      z[g] = first + g < count ? float_of<D>(at[g * stride]) : 0.0f;
    }
#pragma unroll
    for (int g = 0; g < kAtOnce; ++g, column += pitch) {
      if (first + g >= count) continue;
      const double e = models[first + g].delta(z[g], z0) - base;
      *column = static_cast<float>(e);
      found.include(*column);
      found.total += e;
    }
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

// What a thread finds at its token.
struct TokenFindings {
  TileToken token{};
  double mass = 0.0, balance = 0.0, common = 0.0, middle = 0.0, growth = 0.0;  // as in TokenTotals
  double shared = 0.0, apart = 0.0;  // norms of what the models share and of what they do not
  bool wide = false;                 // some |t| may exceed 1: these models are summed in double
  bool for_all = false;              // all models are
  bool failed = false;               // floats do not serve the position
};

// A token of the public row; past its end, as if it were masked.
struct PublicToken {
  float z0;
  double log_q;
};
template <Dtype D>
__device__ PublicToken public_token(const LossCall& call, std::int64_t position, std::int64_t v) {
  const float z0 = v < call.in.shape.vocab
                       ? logit<D>(row_bits<D>(call.in.public_logits, 0, position), v)
                       : -HUGE_VALF;
  return {z0, z0 - call.in.public_lse[position]};
}

// Reads token v and writes the models' deviations there to `column`, a pitch apart. `base_model`:
// -1 for deviations in floats.
template <Dtype D>
__device__ TokenFindings load_token(const LossCall& call, const FloatFacts& facts, int base_model,
                                    std::int64_t position, std::int64_t v, const PublicToken& token,
                                    const TileMemory& tile, float* column, int pitch) {
  TokenFindings found;
  const int models = static_cast<int>(call.in.shape.models);
  const Neighbours& all = call.all;
  const float z0 = token.z0;
  const double lq = token.log_q;
  if (!(lq >= kFloatLogQ)) {
    if (z0 == -HUGE_VALF) {
      found.failed = v < call.in.shape.vocab && any_private<D>(call, position, v);
    } else {
      found.for_all = lq >= kWildLogQ;
      found.failed = !found.for_all;  // too rare, or NaN
    }
    for (int i = 0; i < models; ++i) column[i * pitch] = 0.0f;
    return found;
  }
  const bool in_double = base_model >= 0;
  double base = 0.0;
  const Deviations own =
      in_double ? double_deviations<D>(call, tile.doubles, base_model, position, v, z0, column,
                                       pitch, base)
                : float_deviations<D>(call, tile.models, position, v, z0, column, pitch);
  const double others = own.total * call.a_slot;
  const double mean = vfma(base, models * call.a_slot, others);
  const double middle = all.against_public ? -base : others - base * (all.absent * call.a_slot);
  const double q = exp_(lq), ratio = 1.0 + mean;
  if (!(ratio >= least_ratio(in_double))) {
    found.for_all = true;  // the mixture is far below q, so 1 + mean cancels too much
    found.failed = mean != mean;
    return found;  // all t are 0, as the deviations are finite unless this position fails
  }
  const double inverse = 1.0 / ratio, relative = inverse * call.a_neighbour;
  const double p = q * ratio, part = mean * relative, distance = middle * relative;
  found.mass = p;
  found.balance = q * mean;
  found.common = p * part * part;
  found.middle = p * distance * distance;
  found.growth = (mean + 2.0 * facts.mean_weight) * inverse;
  const double factor = relative * call.a_reach[facts.degree];
  found.token = {static_cast<float>(middle * factor), static_cast<float>(factor),
                 static_cast<float>(p)};
  // Rounding keeps order, so no |t| of a model is larger.
  found.wide = !(vfma(own.largest, found.token.factor, std::fabs(found.token.middle)) <= 1.0f);
  found.shared = q * inverse * mean * mean;
  // The mean of (mean - e_i)^2 over the models, in case of floats.
  const double spread = own.squares + mean * (models * mean - 2.0 * own.total);
  found.apart = q * inverse * spread / models;
  return found;
}

ADAPMIXED_CORE_END
