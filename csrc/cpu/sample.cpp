// Tokens from integer weights, normals, and single log-probabilities: scalar work per position.
#include "core/sampling.h"

#include <vector>

#include "core/leave_one_out.h"
#include "cpu/parallel.h"

namespace adapmixed::cpu {

namespace core = adapmixed::ADAPMIXED_ISA;

void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, int threads) {
  const std::int64_t blocks = (count + 7) / 8;
  parallel_for(blocks, 64, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      // 2^32 blocks to a lane.
      const core::Stream stream{key, counter, static_cast<std::uint32_t>(k >> 32)};
      std::uint64_t words[8];
      double normals[8];
      stream.block(static_cast<std::uint32_t>(k), words);
      for (int i = 0; i < 8; i += 2) core::normal_pair(words[i], words[i + 1], normals + i);
      for (std::int64_t i = 0; i < 8 && 8 * k + i < count; ++i) {
        result[8 * k + i] = sigma * normals[i];
      }
    }
  });
}

void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
            std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
            std::int64_t* tokens, std::int32_t* status, int threads) {
  parallel_for(positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::vector<core::uint128> cumulative(vocab);
    for (std::int64_t b = begin; b < end; ++b) {
      const core::Row row = core::row_of(public_logits, 0, b);
      core::uint128 total = 0;
      double sum = 0.0;
      bool valid = true;
      for (std::int64_t v = 0; v < vocab; ++v) {
        const double p = probabilities[b * vocab + v];
        valid = valid && p >= 0.0 && p <= 1.0 + 1e-6;  // false for a NaN
        if (!valid) break;
        sum += p;
        total += core::integer_weight(p, row.at(v) > -HUGE_VAL);
        cumulative[v] = total;
      }
      tokens[b] = -1;
      if (!valid || std::fabs(sum - 1.0) > 1e-6) {
        status[b] = 1;
        continue;
      }
      status[b] = total == 0 ? 2 : 0;
      if (total == 0) continue;
      const core::Stream stream{key, counter, static_cast<std::uint32_t>(b)};
      const core::uint128 draw = core::uniform_below(stream, total);
      // The first token whose cumulative weight exceeds the draw; weight 0 is never it.
      std::int64_t low = 0, high = vocab - 1;
      while (low < high) {
        const std::int64_t mid = (low + high) / 2;
        if (cumulative[mid] > draw) {
          high = mid;
        } else {
          low = mid + 1;
        }
      }
      tokens[b] = low;
    }
  });
}

void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, int threads) {
  parallel_for(in.shape.positions, 16, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      // Not needed where every weight is 1, but a public row without it would be no distribution.
      const double z = core::row_of(in.public_logits, 0, b).at(targets[b]);
      double total = z < HUGE_VAL ? -HUGE_VAL : NAN;
      for (std::int64_t i = 0; i < in.shape.models; ++i) {
        total = core::log_add(total, core::log_projected(in, weights, i, b, targets[b]));
      }
      result[b] = total - std::log(static_cast<double>(in.shape.models));
    }
  });
}

}  // namespace adapmixed::cpu
