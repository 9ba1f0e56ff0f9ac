// The log-sum-exps of many rows, each of which several warps share. A warp takes one part of a row
// and reads it once. Whoever needs a log-sum-exp adds up the row's parts, in order.
//
// The warp copies its part to shared memory in stages, one of which is on its way while another is
// read. There a lane reads one token at a time, next to its neighbours' tokens. So rows need no
// alignment, which a vocabulary of odd length leaves most of them without, and no bit depends on
// it.
#pragma once

#include <limits>

#include "common/block.cuh"
#include "common/exp_from.cuh"
#include "common/launch.cuh"
#include "common/staged_parts.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kAtOnce = 32;  // tokens of a lane in a stretch
constexpr int kStretch = kAtOnce * kWarp;
constexpr int kBatch = 16;  // tokens that a lane has in registers together
constexpr int kMostPart = 2048;

// How the rows of some positions are cut into parts.
struct RowParts {
  std::int64_t positions, vocab;
  int rows;    // of a position
  int length;  // tokens of a part, whole stretches
  int count;   // parts of a row
  // Where RowPart lies: those of a row follow each other, or those of a part.
  std::int64_t row_step, part_step;

  RowParts(std::int64_t positions_, std::int64_t rows_, std::int64_t vocab_,
           bool rows_together = false)
      : positions(positions_),
        vocab(vocab_),
        rows(static_cast<int>(rows_)),
        length(static_cast<int>(simulated_or(kMostPart, kStretch))),
        count(static_cast<int>((vocab_ + length - 1) / length)),
        row_step(rows_together ? 1 : count),
        part_step(rows_together ? rows : 1) {}

  ADAPMIXED_HD int stretches() const { return length / kStretch; }  // of a part
  ADAPMIXED_HD std::int64_t parts() const { return positions * rows * count; }
  ADAPMIXED_HD std::int64_t first(std::int64_t position) const { return position * rows * count; }
};

struct alignas(16) RowPart {
  double sum;        // sum_v e^{z_v} 2^-octaves; NaN if a logit is NaN
  float largest;     // logit
  int octaves;       // those of a logit of the part, at most kHeadroom below the largest
  double low, high;  // what the caller looks for
};

// For callers that look for nothing but log-sum-exps.
struct NoLook {
  static constexpr int blocks(Dtype) { return 4; }  // that a multiprocessor has room for
  using Other = char;
  struct Found {};

  __device__ Other other(float) const { return 0; }
  __device__ void see(Found&, float, Other) const {}
  __device__ void leave(Found&, std::int64_t) const {}
  template <Dtype D>
  __device__ void finish(const Found&, const typename Bits<D>::type*, int, const Other*,
                         RowPart&) const {}
  template <Dtype D>
  __device__ void finish_public(const typename Bits<D>::type*, int, RowPart&) const {}
  __device__ void begin(std::int64_t) const {}
};

// About log2(e^z). Beyond the logits that a row may have, that of the nearest of these.
__device__ inline int octaves_of(float z) {
  constexpr double kMost = 2.0 * kMaxLogit;
  return static_cast<int>(vround(vmax(-kMost, vmin(kMost, z * kLog2e))));
}
// 2^n for n <= 0; 2^-1000 stands for all below it.
__device__ inline double scale_down(int n) { return power_of_two(n < -1000 ? -1000 : n); }

// A lane's tokens of a row: the first of `left` and every 32nd after it. Beyond these, -inf.
template <Dtype D, int kCount>
__device__ void load_tokens(const typename Bits<D>::type* row, int left, float (&z)[kCount]) {
  if (left > (kCount - 1) * kWarp) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) z[k] = float_of<D>(row[k * kWarp]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      z[k] = k * kWarp < left ? float_of<D>(row[k * kWarp]) : -HUGE_VALF;
    }
  }
}

// The sum of a part stays below e^{kHeadroom} times the number of its tokens.
constexpr float kHeadroom = 40.0f;

// One part of a row, by one warp, which copies on while it reads. others: what is kept of the
// public logits of these tokens.
template <Dtype D, class Look>
__device__ RowPart row_part(StagedParts<D>& staged, const typename Bits<D>::type* row,
                            const Look& look, const typename Look::Other* others,
                            const std::uint64_t* roots, std::int64_t left) {
  using Staged = StagedParts<D>;
  const int size = staged.size();
  float largest = -HUGE_VALF, bearable = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0;
  typename Look::Found found;
#pragma unroll 1
  for (int stage = 0; stage < staged.stages(); ++stage) {
    const auto* tokens = staged.await(row);
    const int begin = stage * Staged::kTokens;
#pragma unroll 1
    for (int batch = 0; batch < Staged::kTokens; batch += kBatch * kWarp) {
      const int own = batch + lane_id(), first = begin + own;
      float z[kBatch];
      load_tokens<D>(tokens + own, size - first, z);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) largest = std::fmax(largest, z[k]);
      // True for the first logits, and hardly ever afterwards.
      if (__any_sync(kAllLanes, largest > bearable)) {
#pragma unroll
        for (int step = kWarp / 2; step > 0; step /= 2) {
          largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, step));
        }
        const int before = octaves;
        octaves = octaves_of(largest);
        total *= scale_down(before - octaves);
        bearable = largest + kHeadroom;
      }
      const ExpFrom exp_from(roots, octaves);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        total = exp_from.add(total, z[k]);
        look.see(found, z[k], others[first + k * kWarp]);
      }
    }
    if ((begin + Staged::kTokens) % kStretch == 0) {
      look.leave(found, left);
      left += kWarp;
    }
  }
  if (total != total) {  // a NaN, or +inf
    bool has_nan = false;
    for (int v = lane_id(); v < size; v += kWarp) has_nan = has_nan || std::isnan(logit<D>(row, v));
    total = has_nan ? NAN : 0.0;
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  double sums[1] = {total};
  warp_reduce(sums, Add{});
  RowPart part{sums[0], largest, octaves, 0.0, 0.0};
  look.template finish<D>(found, row, size, others, part);
  return part;
}

// Bytes of shared memory for what is kept of the public logits of a part.
template <class Look>
ADAPMIXED_HD int look_bytes(const RowParts& cut) {
  return cut.length * static_cast<int>(sizeof(typename Look::Other));
}

// All rows of all positions: the public row first, then the models'. Look says what else is looked
// for, of each token together with its public logit.
// A warp takes `each` rows, one after the other.
template <Dtype D, class Look>
__global__ void __launch_bounds__(kRowThreads, Look::blocks(D))
    row_parts_kernel(const __grid_constant__ Logits private_logits,
                     const __grid_constant__ Logits public_logits,
                     const __grid_constant__ RowParts cut, unsigned groups, int each,
                     const __grid_constant__ Look look, RowPart* parts) {
  const unsigned part = blockIdx.x / groups % cut.count;
  const std::int64_t position = blockIdx.x / groups / cut.count;
  const std::int64_t begin = static_cast<std::int64_t>(part) * cut.length;
  const std::int64_t left = cut.vocab - begin;
  const int size = left < cut.length ? static_cast<int>(left) : cut.length;
  auto* others = dynamic_shared<typename Look::Other>();
  StagedParts<D> staged(
      private_logits, public_logits, position, begin, size, cut.length / StagedParts<D>::kTokens,
      dynamic_shared<char>() + look_bytes<Look>(cut) + warp_id() * StagedParts<D>::Pieces::kBytes);
  const int first = static_cast<int>(blockIdx.x % groups) * each * kRowWarps;
  const int end = first + each * kRowWarps < cut.rows ? first + each * kRowWarps : cut.rows;
  staged.start(first + warp_id(), end);
#pragma unroll 8
  for (int k = static_cast<int>(threadIdx.x); k < cut.length; k += static_cast<int>(blockDim.x)) {
    others[k] = look.other(k < size ? logit<D>(staged.part(0), k) : -HUGE_VALF);
  }
  const std::uint64_t* roots = shared_roots();  // with a barrier
#pragma unroll 1
  for (int row = first + warp_id(); row < end; row += kRowWarps) {
    const std::int64_t scores = ((position * cut.rows + row) * cut.count + part) *
                                static_cast<std::int64_t>(cut.stretches() * kWarp);
    RowPart found = row_part<D>(staged, staged.part(row), look, others, roots, scores);
    if (row == 0) look.template finish_public<D>(staged.part(0), size, found);
    if (lane_id() != 0) continue;
    parts[cut.first(position) + row * cut.row_step + part * cut.part_step] = found;
    if (part == 0 && row == 0) look.begin(position);
  }
}

struct RowSum {
  double lse;
  std::int32_t status;
};

// From a row's sum times 2^-octaves, and its largest logit.
__device__ inline RowSum row_sum_of(double total, double largest, int octaves) {
  if (total != total) return {NAN, kRowNan};
  if (largest == HUGE_VAL) return {NAN, kRowPlusInf};
  if (largest == -HUGE_VAL) return {NAN, kRowEmpty};
  if (std::fabs(largest) > kMaxLogit) return {NAN, kRowTooLarge};
  return {octaves / kLog2e + std::log(total), kRowOk};
}

// The log-sum-exp of a row, or its status, from its parts. kLanes: 1, or those of a warp, which
// calls this together and shares the parts.
template <int kLanes>
__device__ RowSum row_sum(const RowPart* parts, int count) {
  const int first = kLanes == 1 ? 0 : lane_id();
  float largest = -HUGE_VALF;
  int octaves = octaves_of(largest);
#pragma unroll 8
  for (int k = first; k < count; k += kLanes) {
    const RowPart part = parts[k];
    largest = std::fmax(part.largest, largest);
    octaves = part.octaves > octaves ? part.octaves : octaves;
  }
  double most[2] = {largest, static_cast<double>(octaves)}, total[1] = {0.0};
  if constexpr (kLanes > 1) warp_reduce(most, Max{});
  octaves = static_cast<int>(most[1]);
#pragma unroll 8
  for (int k = first; k < count; k += kLanes) {
    total[0] = vfma(parts[k].sum, scale_down(parts[k].octaves - octaves), total[0]);
  }
  if constexpr (kLanes > 1) warp_reduce(total, Add{});
  return row_sum_of(total[0], most[0], octaves);
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

// How many rows a warp takes. More leave fewer blocks to look at the public logits, which takes two
// thirds of a row's time. But the blocks should fill the GPU, all of them or none.
inline int rows_of_a_warp(const ADAPMIXED_ISA::RowParts& cut, int blocks_at_once) {
  constexpr std::int64_t kWarps = ADAPMIXED_ISA::kRowWarps;
  const std::int64_t room = multiprocessors() * blocks_at_once;
  std::int64_t best = 1, least = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t each = 1; each <= 16; ++each) {
    const std::int64_t groups = (cut.rows + each * kWarps - 1) / (each * kWarps);
    const std::int64_t blocks = cut.positions * cut.count * groups;
    const std::int64_t time = (blocks + room - 1) / room * (3 * each + 2);
    if (time < least) best = each, least = time;
  }
  return static_cast<int>(best);
}

// Queues row_parts_kernel.
template <Dtype D, class Look>
void launch_row_parts(const Queue& queue, const Logits& private_logits, const Logits& public_logits,
                      const ADAPMIXED_ISA::RowParts& cut, const Look& look,
                      ADAPMIXED_ISA::RowPart* parts) {
  namespace device = ADAPMIXED_ISA;
  const int each = rows_of_a_warp(cut, Look::blocks(D));
  const int groups = (cut.rows + each * device::kRowWarps - 1) / (each * device::kRowWarps);
  const dim3 threads = block_of(cut.rows * std::int64_t{device::kWarp}, device::kRowThreads);
  const int staged =
      static_cast<int>(threads.x) / device::kWarp * device::StagedParts<D>::Pieces::kBytes;
  launch(queue, device::row_parts_kernel<D, Look>, grid_of(cut.positions * cut.count * groups),
         threads, static_cast<std::size_t>(device::look_bytes<Look>(cut) + staged), private_logits,
         public_logits, cut, static_cast<unsigned>(groups), each, look, parts);
}

}  // namespace adapmixed::cuda
