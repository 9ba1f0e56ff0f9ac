// The log-sum-exps of many rows, each of which several warps share. A warp takes one part of a row
// and reads it once. Whoever needs a log-sum-exp adds up the row's parts, in order.
//
// The warp copies its part to shared memory in stages, one of which is on its way while another is
// read. There a lane reads one token at a time, next to its neighbours' tokens. So rows need no
// alignment, which a vocabulary of odd length leaves most of them without, and no bit depends on
// it.
#pragma once

#include "common/block.cuh"
#include "common/exp_from.cuh"
#include "common/launch.cuh"
#include "common/staged.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;
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

  ADAPMIXED_HD int groups() const { return (rows + kRowWarps - 1) / kRowWarps; }
  std::int64_t blocks_a_position() const { return static_cast<std::int64_t>(groups()) * count; }
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

// A warp's part of a row, in stages of 2 KiB. Shared memory holds a ring of them.
template <Dtype D>
struct StagedPart {
  using Word = typename Bits<D>::type;
  static constexpr int kRing = 2;
  static constexpr int kTokens = 2048 / static_cast<int>(sizeof(Word));  // of a stage
  static constexpr int kStage = staged_bytes<D>(kTokens), kBytes = kRing * kStage;

  Word* memory;
  const Word* row;
  int left;  // tokens of the row from the part's first on, or as many as matter

  __device__ Word* place(int stage) const {
    return memory + stage % kRing * (kStage / static_cast<int>(sizeof(Word)));
  }
  // Begins to copy a stage, if there is one. A whole warp must call this together, and all its
  // lanes must have read the stage that was there.
  __device__ void begin(int stage, int stages) const {
    const int first = stage * kTokens;
    if (stage < stages) stage_tokens<D, kTokens>(place(stage), row + first, left - first);
    end_copies();
  }
  // Waits for a stage, the last but kRing - 1 that has begun, and returns its tokens. A whole warp
  // must call this together.
  __device__ const Word* await(int stage) const {
    await_copies<kRing - 1>();
    __syncwarp();
    return place(stage) + tokens_before<D>(row);
  }
};

// The sum of a part stays below e^{kHeadroom} times the number of its tokens.
constexpr float kHeadroom = 40.0f;

// One part of a row, by one warp, whose first stages have begun: `length` tokens. others: what is
// kept of the public logits of these tokens. at: where `look` leaves what it finds.
template <Dtype D, class Look>
__device__ RowPart row_part(const StagedPart<D>& staged, int length, const Look& look,
                            const typename Look::Other* others, const std::uint64_t* roots,
                            std::int64_t at) {
  using Staged = StagedPart<D>;
  const auto* row = staged.row;
  float largest = -HUGE_VALF, bearable = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0;
  typename Look::Found found;
#pragma unroll 1
  for (int stage = 0; stage < length / Staged::kTokens; ++stage) {
    const auto* tokens = staged.await(stage);
    const int begin = stage * Staged::kTokens;
#pragma unroll 1
    for (int batch = 0; batch < Staged::kTokens; batch += kBatch * kWarp) {
      const int own = batch + lane_id(), first = begin + own;
      float z[kBatch];
      load_tokens<D>(tokens + own, staged.left - first, z);
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
      look.leave(found, at);
      at += kWarp;
    }
    __syncwarp();  // all lanes have read the stage
    staged.begin(stage + Staged::kRing, length / Staged::kTokens);
  }
  const int size = staged.left < length ? staged.left : length;
  if (!(std::fabs(total) < HUGE_VAL)) {  // a NaN, +inf or a logit far beyond kMaxLogit
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
template <Dtype D, class Look>
__global__ void __launch_bounds__(kRowThreads, Look::blocks(D))
    row_parts_kernel(const __grid_constant__ Logits private_logits,
                     const __grid_constant__ Logits public_logits,
                     const __grid_constant__ RowParts cut, const __grid_constant__ Look look,
                     RowPart* parts) {
  const unsigned groups = cut.groups();
  const unsigned part = blockIdx.x / groups % cut.count;
  const std::int64_t position = blockIdx.x / groups / cut.count;
  const std::int64_t begin = static_cast<std::int64_t>(part) * cut.length;
  const std::int64_t left = cut.vocab - begin;
  const int size = left < cut.length ? static_cast<int>(left) : cut.length;
  const auto* public_row = row_bits<D>(public_logits, 0, position);
  const int row = static_cast<int>(blockIdx.x % groups) * kRowWarps + warp_id();
  const auto* logits =
      row == 0 || row >= cut.rows ? public_row : row_bits<D>(private_logits, row - 1, position);
  auto* others = dynamic_shared<typename Look::Other>();
  char* memory = dynamic_shared<char>() + look_bytes<Look>(cut) + warp_id() * StagedPart<D>::kBytes;
  const StagedPart<D> staged{reinterpret_cast<typename Bits<D>::type*>(memory), logits + begin,
                             left < 2 * kMostPart ? static_cast<int>(left) : 2 * kMostPart};
  const int stages = row < cut.rows ? cut.length / StagedPart<D>::kTokens : 0;
#pragma unroll
  for (int stage = 0; stage < StagedPart<D>::kRing; ++stage) staged.begin(stage, stages);
#pragma unroll 8
  for (int k = static_cast<int>(threadIdx.x); k < cut.length; k += static_cast<int>(blockDim.x)) {
    others[k] = look.other(k < size ? logit<D>(public_row, begin + k) : -HUGE_VALF);
  }
  const std::uint64_t* roots = shared_roots();  // with a barrier
  if (row >= cut.rows) return;
  const std::int64_t scores = ((position * cut.rows + row) * cut.count + part) *
                              static_cast<std::int64_t>(cut.stretches() * kWarp);
  RowPart found = row_part<D>(staged, cut.length, look, others, roots, scores);
  if (row == 0) look.template finish_public<D>(staged.row, size, found);
  if (lane_id() == 0) {
    parts[cut.first(position) + row * cut.row_step + part * cut.part_step] = found;
  }
  if (part == 0 && row == 0 && lane_id() == 0) look.begin(position);
}

struct RowSum {
  double lse;
  std::int32_t status;
};

// The log-sum-exp of a row, or its status, from its parts, which lie `step` apart. Neighbouring
// lanes share them, kLanes for a row; each has kLoads on their way together. A whole warp must call
// this together.
template <int kLanes, int kLoads>
__device__ RowSum row_sum(const RowPart* parts, std::int64_t step, int count) {
  float largest = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0;
  for (int first = lane_id() % kLanes; first < count; first += kLanes * kLoads) {
    double sums[kLoads];
    int of[kLoads], most = octaves;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int k = first + kLanes * j;
      const RowPart* part = parts + k * step;
      sums[j] = k < count ? part->sum : 0.0;
      of[j] = k < count ? part->octaves : octaves;
      largest = std::fmax(largest, k < count ? part->largest : -HUGE_VALF);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) most = of[j] > most ? of[j] : most;
    total *= scale_down(octaves - most);
    octaves = most;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) total = vfma(sums[j], scale_down(of[j] - octaves), total);
  }
#pragma unroll
  for (int by = kLanes / 2; by > 0; by /= 2) {
    largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, by));
    const int other = __shfl_xor_sync(kAllLanes, octaves, by);
    const int most = other > octaves ? other : octaves;
    total *= scale_down(octaves - most);
    total += __shfl_xor_sync(kAllLanes, total, by);
    octaves = most;
  }
  if (total != total) return {NAN, kRowNan};
  if (largest == HUGE_VALF) return {NAN, kRowPlusInf};
  if (largest == -HUGE_VALF) return {NAN, kRowEmpty};
  if (std::fabs(largest) > kMaxLogit) return {NAN, kRowTooLarge};
  return {octaves / kLog2e + std::log(total), kRowOk};
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

// Queues row_parts_kernel.
template <Dtype D, class Look>
void launch_row_parts(const Queue& queue, const Logits& private_logits, const Logits& public_logits,
                      const device::RowParts& cut, const Look& look, device::RowPart* parts) {
  const dim3 threads = block_of(cut.rows * std::int64_t{device::kWarp}, device::kRowThreads);
  const int ring = static_cast<int>(threads.x) / device::kWarp * device::StagedPart<D>::kBytes;
  launch(queue, device::row_parts_kernel<D, Look>, grid_of(cut.positions * cut.blocks_a_position()),
         threads, static_cast<std::size_t>(device::look_bytes<Look>(cut) + ring), private_logits,
         public_logits, cut, look, parts);
}

}  // namespace adapmixed::cuda
