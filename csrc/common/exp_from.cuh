// e^{z - m} for many z and one m, summed (common/sixteenths.h).
#pragma once

#include "common/runtime.cuh"
#include "common/sixteenths.h"

ADAPMIXED_CORE_BEGIN

// The roots 2^{j/16} in shared memory, the same for every row. A whole block must call this
// together.
__device__ inline const std::uint64_t* shared_roots() {
  __shared__ std::uint64_t roots[kRoots];
  const int j = static_cast<int>(threadIdx.x);
  if (j < kRoots) roots[j] = root_bits(kRootValues[j], j);
  __syncthreads();
  return roots;
}

// m is an integer times an octave, so one multiply-add subtracts the integer part of
// 16 z log2(e) - 16 m log2(e).
class ExpFrom {
 public:
  __device__ ExpFrom(const std::uint64_t* roots, int octaves)
      : steps_(kRoots * static_cast<double>(octaves)),
        lowest_(static_cast<float>(octaves * (1.0 / kLog2e) - kReach)),
        roots_(roots) {}

  // Returns total + e^{z - m}. NaN gives NaN. The result is meaningless for z far above m.
  __device__ double add(double total, float z) const {
    const double x = raised(z, lowest_);
    const double shifter = kShifter - steps_;
    const double shifted = vfma(x, kSixteenths, shifter);
    const double f = vfma(x, kSixteenths, shifter - shifted);
    const auto n = bit_cast<std::uint64_t>(shifted);
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

  // The largest allowed distance of a logit below m; a smaller logit is raised to m - kReach.
  static constexpr double kReach = 600.0;
  static constexpr double kShifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds
  double steps_;                                          // sixteenths of an octave
  float lowest_;
  const std::uint64_t* roots_;
};

ADAPMIXED_CORE_END
