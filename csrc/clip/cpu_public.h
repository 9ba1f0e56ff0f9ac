// The public row as the private rows of its position use it in clip_project.
#pragma once

#include <cmath>

#include "clip/cpu_sums.h"

ADAPMIXED_CORE_BEGIN

// Padded to whole groups with q = 0.
struct ClipPublic {
  Row row;
  double lse;
  std::int64_t vocab, padded;
  double *q, *inverse;  // 1 / q, or 0 if q is 0
  double missing;       // 1 - sum q
  std::int64_t top;     // the most likely token

  // The tokens from which rows guess s: every token with q >= unit, and one for every `unit` of the
  // other tokens' mass, which represents that mass. Padded with q = 0.
  struct Sample {
    double unit, missing;                 // missing: 1 - the mass that the sample represents
    std::int64_t certain, count, padded;  // the first `certain` tokens represent only themselves
    std::int32_t* tokens;
    double *weights, *q;  // how many tokens each represents, and their q
  } sample;

  static constexpr std::int64_t kPadding = 32;
  static std::int64_t padding(std::int64_t vocab) { return round_up(vocab, kPadding); }
  static std::int64_t sample_size(std::int64_t vocab) { return padding(units(vocab) + 2); }
  static std::int64_t scratch_size(std::int64_t vocab) {
    return 2 * padding(vocab) + 3 * sample_size(vocab);
  }

  template <Dtype D>
  void load(const Row& public_row, double public_lse, std::int64_t row_vocab, double* memory) {
    row = public_row, lse = public_lse, vocab = row_vocab, padded = padding(vocab);
    q = memory, inverse = q + padded;
    for (std::int64_t v = 0; v < padded; v += Vec::kLanes) {
      const Vec z = v < vocab ? load_logits<D>(row.data, v, vocab) : Vec(-HUGE_VAL), zero(0.0);
      const auto present = z > Vec(-HUGE_VAL);
      const Vec here = vselect(present, exp_(vmax(Vec(kRarestClipped), z - Vec(lse))), zero);
      here.store(q + v);
      vselect(present, Vec(1.0) / here, zero).store(inverse + v);
    }
    missing = 1.0 - total_of_q();
    top = 0;
    for (std::int64_t v = 1; v < vocab; ++v) {
      if (q[v] > q[top]) top = v;
    }
    take_sample(inverse + padded);
  }

 private:
  // More units would cost every row more than the closer guess saves.
  static std::int64_t units(std::int64_t vocab) { return vocab < 1024 ? 256 : vocab / 4; }

  void take_sample(double* memory) {
    const std::int64_t size = sample_size(vocab);
    sample.weights = memory, sample.q = memory + size;
    sample.tokens = reinterpret_cast<std::int32_t*>(memory + 2 * size);
    sample.unit = 1.0 / static_cast<double>(units(vocab));
    sample.missing = 1.0, sample.count = 0;
    const auto take = [&](std::int64_t v, double weight) {
      if (sample.count == units(vocab) + 2) return;  // only if q sums to much more than 1
      sample.tokens[sample.count] = static_cast<std::int32_t>(v);
      sample.weights[sample.count] = weight;
      sample.missing -= sample.q[sample.count++] = weight * q[v];
    };
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (q[v] >= sample.unit) take(v, 1.0);
    }
    sample.certain = sample.count;
    double passed = 0.5 * sample.unit;
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (q[v] >= sample.unit) continue;
      passed += q[v];
      if (passed < sample.unit) continue;
      passed -= sample.unit;
      take(v, sample.unit / q[v]);
    }
    sample.padded = round_up(sample.count, kClipGroup);
    for (std::int64_t k = sample.count; k < sample.padded; ++k) {
      sample.tokens[k] = 0, sample.weights[k] = sample.q[k] = 0.0;
    }
  }

  double total_of_q() const {
    double total = 0.0;
    for (std::int64_t v = 0; v < padded;) {
      Vec part[4] = {Vec(0.0), Vec(0.0), Vec(0.0), Vec(0.0)};
      for (const std::int64_t end = block_end(v, padded); v < end; v += kClipGroup) {
        for (int k = 0; k < 4; ++k) part[k] = part[k] + Vec::load(q + v + k * Vec::kLanes);
      }
      total += sum(part[0] + part[1] + (part[2] + part[3]));
    }
    return total;
  }
};

ADAPMIXED_CORE_END
