// The log-sum-exps of many rows, each of which several warps share. A warp takes one part of a row
// and reads it once. Whoever needs a log-sum-exp adds up the row's parts, in order.
//
// A lane reads one token at a time, next to its neighbours' tokens. So rows need no alignment: a
// vocabulary of odd length leaves most rows without one.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"
#include "common/log_sum_exp.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kAtOnce = 32;  // tokens that a lane loads at once
constexpr int kMostPart = 2048;
// Blocks that a multiprocessor shall have room for. With three, code for sm_80 would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRowBlocks = 2;
#else
constexpr int kRowBlocks = 3;
#endif

// How the rows of some positions are cut into parts.
struct RowParts {
  std::int64_t vocab;
  int rows;          // of a position
  int rows_a_block;  // each of its warps takes some
  int length;        // tokens of a part
  int count;         // parts of a row

  RowParts(std::int64_t positions, std::int64_t rows_, std::int64_t vocab_)
      : vocab(vocab_),
        rows(static_cast<int>(rows_)),
        // More share the public row; few positions need more blocks.
        rows_a_block(positions < simulated_or(4, 2) ? kRowWarps : 2 * kRowWarps),
        length(static_cast<int>(simulated_or(kMostPart, 64))),
        count(static_cast<int>((vocab_ + length - 1) / length)) {}

  ADAPMIXED_HD int groups() const { return (rows + rows_a_block - 1) / rows_a_block; }
  std::int64_t blocks_a_position() const { return static_cast<std::int64_t>(groups()) * count; }
};

struct alignas(16) RowPart {
  double sum;        // sum_v e^{z_v} 2^-octaves; NaN if a logit is NaN
  float largest;     // logit
  int octaves;       // octaves_of(largest)
  double low, high;  // the extremes of z - z_0 over the tokens with q > 0
};

// About log2(e^z). Beyond the logits that a row may have, that of the nearest of these.
__device__ inline int octaves_of(float z) {
  constexpr double kMost = 2.0 * kMaxLogit;
  return static_cast<int>(vround(vmax(-kMost, vmin(kMost, z * kLog2e))));
}
// 2^n for n <= 0; 2^-1000 stands for all below it.
__device__ inline double scale_down(int n) { return power_of_two(n < -1000 ? -1000 : n); }

// Part [begin, end) of a row, by one warp. others[0...]: the public logits of these tokens, NaN for
// those with q = 0.
template <Dtype D>
__device__ RowPart row_part(const typename Bits<D>::type* row, std::int64_t begin, std::int64_t end,
                            const double* others, const std::uint64_t* roots) {
  constexpr int kStretch = kAtOnce * kWarp;
  float largest = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0, low = HUGE_VAL, high = -HUGE_VAL;
  bool has_nan = false;
  for (; begin < end; begin += kStretch, others += kStretch) {
    float z[kAtOnce];
    const auto* own = row + begin + lane_id();
    if (begin + kStretch <= end) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) z[k] = float_of<D>(own[k * kWarp]);
    } else {
      const int left = static_cast<int>(end - begin) - lane_id();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        z[k] = k * kWarp < left ? float_of<D>(own[k * kWarp]) : -HUGE_VALF;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) largest = std::fmax(largest, z[k]);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    const int before = octaves;
    octaves = octaves_of(largest);
    total *= scale_down(before - octaves);
    const ExpFrom exp_from(roots, kRoots * static_cast<double>(octaves));
#pragma unroll
    for (int k = 0; k < kAtOnce; k += kPack) {
      double e[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        e[j] = exp_from(z[k + j]);
        const double difference = z[k + j] - others[(k + j) * kWarp + lane_id()];
        low = vmin(difference, low);  // NaN changes nothing
        high = vmax(difference, high);
      }
      total += (e[0] + e[1]) + (e[2] + e[3]);
    }
    if (total != total) {  // a NaN, or +inf
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) has_nan = has_nan || std::isnan(z[k]);
      total = has_nan ? NAN : 0.0;
    }
  }
  double sums[1] = {total}, extremes[2] = {-low, high};
  warp_reduce(sums, Add{});
  warp_reduce(extremes, Max{});
  return {sums[0], largest, octaves, -extremes[0], extremes[1]};
}

// All rows of all positions: the public row first, then the models'. Clears a counter for each
// position.
template <Dtype D>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    row_parts_kernel(const __grid_constant__ Logits private_logits,
                     const __grid_constant__ Logits public_logits,
                     const __grid_constant__ RowParts cut, RowPart* parts, unsigned* counters) {
  __shared__ double others[kMostPart];
  const unsigned groups = cut.groups();
  const unsigned part = blockIdx.x / groups % cut.count;
  const std::int64_t position = blockIdx.x / groups / cut.count;
  const std::int64_t begin = static_cast<std::int64_t>(part) * cut.length;
  const std::int64_t end = begin + cut.length < cut.vocab ? begin + cut.length : cut.vocab;
  const auto* public_row = row_bits<D>(public_logits, 0, position);
  for (int k = static_cast<int>(threadIdx.x); k < kMostPart; k += kRowThreads) {
    const float z0 = begin + k < end ? logit<D>(public_row, begin + k) : -HUGE_VALF;
    others[k] = z0 == -HUGE_VALF ? NAN : z0;
  }
  const std::uint64_t* roots = shared_roots();  // with a barrier
  const int first = static_cast<int>(blockIdx.x % groups) * cut.rows_a_block;
  const int last = first + cut.rows_a_block < cut.rows ? first + cut.rows_a_block : cut.rows;
  for (int row = first + warp_id(); row < last; row += kRowWarps) {
    const auto* logits = row == 0 ? public_row : row_bits<D>(private_logits, row - 1, position);
    const RowPart found = row_part<D>(logits, begin, end, others, roots);
    if (lane_id() == 0) parts[(position * cut.rows + row) * cut.count + part] = found;
  }
  if (part == 0 && first == 0 && threadIdx.x == 0) counters[position] = 0;
}

// The log-sum-exp of a row, or its status, from its parts.
__device__ inline RowSum row_sum(const RowPart* parts, int count) {
  float largest = -HUGE_VALF;
  int octaves = parts[0].octaves;
  for (int k = 0; k < count; ++k) {
    largest = std::fmax(largest, parts[k].largest);
    octaves = parts[k].octaves > octaves ? parts[k].octaves : octaves;
  }
  double total = 0.0;
  for (int k = 0; k < count; ++k) {
    total = vfma(parts[k].sum, scale_down(parts[k].octaves - octaves), total);
  }
  if (total != total) return {NAN, kRowNan};
  if (largest == HUGE_VALF) return {NAN, kRowPlusInf};
  if (largest == -HUGE_VALF) return {NAN, kRowEmpty};
  if (std::fabs(largest) > kMaxLogit) return {NAN, kRowTooLarge};
  return {octaves / kLog2e + std::log(total), kRowOk};
}

ADAPMIXED_CORE_END
