// The public row as clip_project's private rows of its position read it.
#pragma once

#include <cmath>

#include "clip/cpu_sums.h"

ADAPMIXED_CORE_BEGIN

// Padded to whole groups with q = 0.
struct ClipPublic {
  Row row;
  double lse;
  std::int64_t vocab, padded;
  double *q, *inverse;  // 1 / q, 0 where q is too small to have one
  double missing;       // 1 - sum q
  std::int64_t top;     // the most likely token

  // Tokens from which the rows guess s: all whose q is at least `unit`, and of the others one in
  // every `unit` of their mass, which stands for all that is in it. Padded with q = 0.
  struct Sample {
    double unit, missing;                 // 1 - what all of them stand for
    std::int64_t certain, count, padded;  // the first ones stand for themselves alone
    std::int32_t* tokens;
    double *weights, *q;  // how many tokens each stands for, and their q
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
      const Vec here = v < vocab ? exp_(load_logits<D>(row.data, v, vocab) - Vec(lse)) : Vec(0.0);
      here.store(q + v);
      vselect(here > Vec(1e-300), Vec(1.0) / here, Vec(0.0)).store(inverse + v);
    }
    missing = 1.0 - total_of_q();
    top = 0;
    for (std::int64_t v = 1; v < vocab; ++v) {
      if (q[v] > q[top]) top = v;
    }
    take_sample(inverse + padded);
  }

 private:
  // More of them cost a row more than the closer guess saves.
  static std::int64_t units(std::int64_t vocab) { return vocab < 1024 ? 256 : vocab / 4; }

  void take_sample(double* memory) {
    const std::int64_t size = sample_size(vocab);
    sample.weights = memory, sample.q = memory + size;
    sample.tokens = reinterpret_cast<std::int32_t*>(memory + 2 * size);
    sample.unit = 1.0 / static_cast<double>(units(vocab));
    sample.missing = 1.0, sample.count = 0;
    const auto take = [&](std::int64_t v, double weight) {
      if (sample.count == units(vocab) + 2) return;  // not that q sums to so much more than 1
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
