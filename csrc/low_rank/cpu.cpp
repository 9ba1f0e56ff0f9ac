// z_i = z_0 + sum_k c_ik u_ik: the logits of members that adapt the output layer alone.
//
// Every element is a chain of fused multiply-adds in single precision, which starts with z_0 and
// takes k in order. So its bits depend on neither N, B nor the number of threads, and are the same
// for every instruction set.
#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/rows.h"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr std::int64_t kTile = 512;  // r = 8 rows of the factors stay in the first-level cache
constexpr int kRows = 4;             // positions that share one load of a factor
constexpr int kVectors = 2;

// Writes the tokens [begin, end) of `kCount` positions of one member, the first of which is
// `position`.
template <int kCount>
void add_positions(const LowRankInputs& in, std::int64_t model, std::int64_t position,
                   std::int64_t begin, std::int64_t end, float* out) {
  const std::int64_t vocab = in.shape.vocab, first = model * in.shape.positions + position;
  const float* factors = in.factors + model * in.rank * vocab;
  const float* coefficients = in.coefficients + first * in.rank;
  const float* start = in.public_logits + position * vocab;
  float* result = out + first * vocab;
  std::int64_t v = begin;
  for (; v + kVectors * Flt::kLanes <= end; v += kVectors * Flt::kLanes) {
    Flt z[kCount][kVectors];
    ADAPMIXED_UNROLL
    for (int b = 0; b < kCount; ++b) {
      ADAPMIXED_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        z[b][j] = Flt::load(start + b * vocab + v + j * Flt::kLanes);
      }
    }
    for (std::int64_t k = 0; k < in.rank; ++k) {
      Flt u[kVectors];
      ADAPMIXED_UNROLL
      for (int j = 0; j < kVectors; ++j)
        u[j] = Flt::load(factors + k * vocab + v + j * Flt::kLanes);
      ADAPMIXED_UNROLL
      for (int b = 0; b < kCount; ++b) {
        const Flt c(coefficients[b * in.rank + k]);
        ADAPMIXED_UNROLL
        for (int j = 0; j < kVectors; ++j) z[b][j] = vfma(c, u[j], z[b][j]);
      }
    }
    ADAPMIXED_UNROLL
    for (int b = 0; b < kCount; ++b) {
      ADAPMIXED_UNROLL
      for (int j = 0; j < kVectors; ++j) z[b][j].store(result + b * vocab + v + j * Flt::kLanes);
    }
  }
  for (; v < end; ++v) {
    for (int b = 0; b < kCount; ++b) {
      float z = start[b * vocab + v];
      for (std::int64_t k = 0; k < in.rank; ++k) {
        z = std::fma(coefficients[b * in.rank + k], factors[k * vocab + v], z);
      }
      result[b * vocab + v] = z;
    }
  }
}

void add_low_rank(const LowRankInputs& in, float* private_logits, int threads) {
  const std::int64_t vocab = in.shape.vocab, tiles = (vocab + kTile - 1) / kTile;
  cpu::parallel_for(in.shape.models * tiles, 1, threads,
                    [&](std::int64_t first, std::int64_t last) {
                      for (std::int64_t task = first; task < last; ++task) {
                        const std::int64_t model = task / tiles, begin = task % tiles * kTile;
                        const std::int64_t end = begin + kTile < vocab ? begin + kTile : vocab;
                        std::int64_t b = 0;
                        for (; b + kRows <= in.shape.positions; b += kRows) {
                          add_positions<kRows>(in, model, b, begin, end, private_logits);
                        }
                        for (; b < in.shape.positions; ++b) {
                          add_positions<1>(in, model, b, begin, end, private_logits);
                        }
                      }
                    });
}

}  // namespace

void add_add_low_rank(cpu::Table& table) { table.add_low_rank = add_low_rank; }

ADAPMIXED_CORE_END
