// The log-sum-exps of many rows, each of which several warps share. A warp takes one part of a row
// and reads it once. Whoever needs a log-sum-exp adds up the row's parts, in order.
//
// A lane reads kPack neighbouring tokens at once, where the row's own address is a multiple of
// their size. A vocabulary of odd length leaves most rows without that alignment, so parts and
// packs of two rows do not begin at the same token.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"
#include "common/log_sum_exp.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kAtOnce = 32;  // tokens that a lane loads at once
constexpr int kPacks = kAtOnce / kPack;
constexpr int kStretch = kAtOnce * kWarp;
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
  int length;        // tokens of a part, whole stretches
  int count;         // parts of a row

  RowParts(std::int64_t positions, std::int64_t rows_, std::int64_t vocab_)
      : vocab(vocab_),
        rows(static_cast<int>(rows_)),
        // More share the public row; few positions need more blocks.
        rows_a_block(positions < simulated_or(4, 2) ? kRowWarps : 2 * kRowWarps),
        length(static_cast<int>(simulated_or(kMostPart, kStretch))),
        count(static_cast<int>((vocab_ + kPack - 1 + length - 1) / length)) {}

  ADAPMIXED_HD int groups() const { return (rows + rows_a_block - 1) / rows_a_block; }
  ADAPMIXED_HD int stretches() const { return length / kStretch; }  // of a part
  std::int64_t blocks_a_position() const { return static_cast<std::int64_t>(groups()) * count; }
};

struct alignas(16) RowPart {
  double sum;        // sum_v e^{z_v} 2^-octaves; NaN if a logit is NaN
  float largest;     // logit
  int octaves;       // octaves_of(largest)
  double low, high;  // what the caller looks for
};

// About log2(e^z). Beyond the logits that a row may have, that of the nearest of these.
__device__ inline int octaves_of(float z) {
  constexpr double kMost = 2.0 * kMaxLogit;
  return static_cast<int>(vround(vmax(-kMost, vmin(kMost, z * kLog2e))));
}
// 2^n for n <= 0; 2^-1000 stands for all below it.
__device__ inline double scale_down(int n) { return power_of_two(n < -1000 ? -1000 : n); }

// The tokens of a row before its first aligned pack, up to kPack: parts begin so much earlier.
template <Dtype D>
__device__ inline int row_phase(const typename Bits<D>::type* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(*row) % kPack);
}

// What is kept of a part's public logits, for rows of every phase: z[j % kPack][j / kPack] is that
// of token begin - kPack + j, so that neighbouring lanes read neighbouring words.
template <class T>
struct PublicPart {
  static constexpr int kColumns = kMostPart / kPack + 1;
  T z[kPack][kColumns];
};

// One part of a row, by one warp. begin: its first token, aligned. Tokens of [low, high) from there
// on are those of the row.
template <Dtype D, class Look>
__device__ RowPart row_part(const typename Bits<D>::type* begin, int low, int high, int length,
                            int phase, const Look& look,
                            const PublicPart<typename Look::Other>& others,
                            const std::uint64_t* roots, std::int64_t left) {
  float largest = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0;
  typename Look::Found found;
  const typename Look::Other* other[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const int at = kPack + j - phase;
    other[j] = &others.z[at % kPack][at / kPack + lane_id()];
  }
  bool has_nan = false;
  for (int at = 0; at < length; at += kStretch) {
    Pack<D> packs[kPacks];
    const auto* own = begin + at + lane_id() * kPack;
    if (at >= low && at + kStretch <= high) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        packs[k] = *reinterpret_cast<const Pack<D>*>(own + k * kWarp * kPack);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int offset = k / kPack * (kWarp * kPack) + k % kPack;
        const int v = at + lane_id() * kPack + offset;
        const bool there = v >= low && v < high;
        packs[k / kPack].bits[k % kPack] = there ? own[offset] : Bits<D>::kMasked;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      largest = std::fmax(largest, float_of<D>(packs[k / kPack].bits[k % kPack]));
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    const int before = octaves;
    octaves = octaves_of(largest);
    total *= scale_down(before - octaves);
    const ExpFrom exp_from(roots, kRoots * static_cast<double>(octaves));
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float z = float_of<D>(packs[k].bits[j]);
        total = exp_from.add(total, z);
        look.see(found, z, other[j][k * kWarp]);
      }
    }
    if (total != total) {  // a NaN, or +inf
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        has_nan = has_nan || std::isnan(float_of<D>(packs[k / kPack].bits[k % kPack]));
      }
      total = has_nan ? NAN : 0.0;
    }
    look.leave(found, left);
    left += kWarp;
#pragma unroll
    for (int j = 0; j < kPack; ++j) other[j] += kPacks * kWarp;
  }
  double sums[1] = {total};
  warp_reduce(sums, Add{});
  RowPart part{sums[0], largest, octaves, 0.0, 0.0};
  look.finish(found, part);
  return part;
}

// All rows of all positions: the public row first, then the models'. Look says what else is looked
// for, of each token together with its public logit.
template <Dtype D, class Look>
__global__ void __launch_bounds__(kRowThreads, Look::kBlocks)
    row_parts_kernel(const __grid_constant__ Logits private_logits,
                     const __grid_constant__ Logits public_logits,
                     const __grid_constant__ RowParts cut, const __grid_constant__ Look look,
                     RowPart* parts) {
  __shared__ PublicPart<typename Look::Other> others;
  const unsigned groups = cut.groups();
  const unsigned part = blockIdx.x / groups % cut.count;
  const std::int64_t position = blockIdx.x / groups / cut.count;
  const std::int64_t begin = static_cast<std::int64_t>(part) * cut.length;
  const auto* public_row = row_bits<D>(public_logits, 0, position);
  for (int k = static_cast<int>(threadIdx.x); k < kPack * others.kColumns; k += kRowThreads) {
    const std::int64_t v = begin - kPack + k;
    const bool there = v >= 0 && v < cut.vocab;
    others.z[k % kPack][k / kPack] = look.other(there ? logit<D>(public_row, v) : -HUGE_VALF);
  }
  const std::uint64_t* roots = shared_roots();  // with a barrier
  const int first = static_cast<int>(blockIdx.x % groups) * cut.rows_a_block;
  const int last = first + cut.rows_a_block < cut.rows ? first + cut.rows_a_block : cut.rows;
  for (int row = first + warp_id(); row < last; row += kRowWarps) {
    const auto* logits = row == 0 ? public_row : row_bits<D>(private_logits, row - 1, position);
    const std::int64_t at = (position * cut.rows + row) * cut.count + part;
    const int phase = row_phase<D>(logits);
    const std::int64_t start = begin - phase, left = cut.vocab - start;
    const int low = start < 0 ? phase : 0;
    const int high = left < cut.length ? static_cast<int>(left) : cut.length;
    RowPart found = row_part<D>(logits + start, low, high, cut.length, phase, look, others, roots,
                                at * cut.stretches() * kWarp);
    if (row == 0) look.template finish_public<D>(logits + start, low, high, found);
    if (lane_id() == 0) parts[at] = found;
  }
  if (part == 0 && first == 0 && threadIdx.x == 0) look.begin(position);
}

// The log-sum-exp of a row, or its status, from its parts. kLanes: 1, or those of a warp, which
// calls this together and shares the parts.
template <int kLanes>
__device__ RowSum row_sum(const RowPart* parts, int count) {
  const int first = kLanes == 1 ? 0 : lane_id();
  double most[2] = {-HUGE_VAL, -HUGE_VAL};  // logit, octaves
  for (int k = first; k < count; k += kLanes) {
    most[0] = vmax(static_cast<double>(parts[k].largest), most[0]);
    most[1] = vmax(static_cast<double>(parts[k].octaves), most[1]);
  }
  if constexpr (kLanes > 1) warp_reduce(most, Max{});
  const int octaves = static_cast<int>(most[1]);
  double total[1] = {0.0};
  for (int k = first; k < count; k += kLanes) {
    total[0] = vfma(parts[k].sum, scale_down(parts[k].octaves - octaves), total[0]);
  }
  if constexpr (kLanes > 1) warp_reduce(total, Add{});
  if (total[0] != total[0]) return {NAN, kRowNan};
  if (most[0] == HUGE_VAL) return {NAN, kRowPlusInf};
  if (most[0] == -HUGE_VAL) return {NAN, kRowEmpty};
  if (std::fabs(most[0]) > kMaxLogit) return {NAN, kRowTooLarge};
  return {octaves / kLog2e + std::log(total[0]), kRowOk};
}

ADAPMIXED_CORE_END
