// lse = log sum_v exp(z_v) of every row, or the status of a row without one. One block takes one
// row and reads it twice.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"
#include "common/sixteenths.h"

ADAPMIXED_CORE_BEGIN

struct RowSum {
  double lse;
  std::int32_t status;
};

// The roots 2^{j/16} in shared memory, the same for every row. A whole block must call this
// together.
__device__ inline const std::uint64_t* shared_roots() {
  __shared__ std::uint64_t roots[kRoots];
  const int j = static_cast<int>(threadIdx.x);
  if (j < kRoots) roots[j] = root_bits(exp_(j / kSixteenths), j);
  __syncthreads();
  return roots;
}

// e^{z - m} for many z and one m (common/sixteenths.h). m is an integer times a sixteenth of an
// octave, so one multiply-add subtracts the integer part of 16 z log2(e) - 16 m log2(e).
class ExpFrom {
 public:
  // A whole block must call this together. m is chosen near `near`.
  __device__ explicit ExpFrom(double near) : ExpFrom(shared_roots(), vround(near * kSixteenths)) {}
  // m is `steps` sixteenths of an octave.
  __device__ ExpFrom(const std::uint64_t* roots, double steps)
      : steps_(steps), lowest_(static_cast<float>(origin() - kReach)), roots_(roots) {}

  // The largest allowed distance of a logit below m; a smaller logit is raised to m - kReach.
  static constexpr double kReach = 600.0;

  __device__ double origin() const { return steps_ / kSixteenths; }

  // Returns total + e^{z - m}. NaN gives NaN. The result is meaningless for z far above m.
  __device__ double add(double total, float z) const {
    const double x = raised(z, lowest_);
    const double shifter = kShifter - steps_;
    const double shifted = vfma(x, kSixteenths, shifter);
    const double f = vfma(x, kSixteenths, shifter - shifted);
    std::uint64_t n;
    std::memcpy(&n, &shifted, sizeof n);
    // Adds n << 48. It changes the upper word alone.
    std::uint32_t words[2];
    std::memcpy(words, roots_ + n % kRoots, sizeof words);
    words[1] += static_cast<std::uint32_t>(n) << 16;
    double scale;
    std::memcpy(&scale, words, sizeof scale);
    return vfma(scale, vfma(f, sixteenth_slope(f), 1.0), total);
  }

 private:
  // The larger of the two, or NaN if z is.
  __device__ static float raised(float z, float least) {
#if defined(ADAPMIXED_SIMT)
    return z < least ? least : z;
#else
    float larger;  // fmaxf would drop the NaN, and a comparison takes two instructions
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(z), "f"(least));
    return larger;
#endif
  }

  static constexpr double kShifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds
  double steps_;
  float lowest_;
  const std::uint64_t* roots_;
};

// A whole block must call this together.
template <Dtype D>
__device__ RowSum row_sum(const typename Bits<D>::type* row, std::int64_t vocab) {
  double found[2] = {-HUGE_VAL, 0.0};  // the largest logit, and 1 if there is a NaN
  for_each_token<D>(row, 0, vocab, [&](std::int64_t, float z) {
    const double x = z;
    if (x > found[0]) found[0] = x;
    if (x != x) found[1] = 1.0;
  });
  block_reduce(found, Max{});
  const double largest = found[0];
  if (found[1] != 0.0) return {NAN, kRowNan};
  if (largest == HUGE_VAL) return {NAN, kRowPlusInf};
  if (largest == -HUGE_VAL) return {NAN, kRowEmpty};
  if (std::fabs(largest) > kMaxLogit) return {NAN, kRowTooLarge};
  const ExpFrom exp_from(largest);
  double total = 0.0;
  for_each_token<D>(row, 0, vocab, [&](std::int64_t, float z) { total = exp_from.add(total, z); });
  return {exp_from.origin() + std::log(block_sum(total)), kRowOk};
}

template <Dtype D>
__global__ void log_sum_exp_kernel(Logits logits, std::int64_t positions, std::int64_t vocab,
                                   double* lse, std::int32_t* status) {
  const std::int64_t k = blockIdx.x;
  const RowSum sum = row_sum<D>(row_bits<D>(logits, k / positions, k % positions), vocab);
  if (threadIdx.x == 0) {
    lse[k] = sum.lse;
    status[k] = sum.status;
  }
}

ADAPMIXED_CORE_END
