// Sums whose bits do not depend on the order of the additions: blocks add integers to them by
// atomic operations. All words begin as 0.
#pragma once

#include "common/block.cuh"

ADAPMIXED_CORE_BEGIN

using Word = unsigned long long;

// A sum of numbers whose sizes add up to less than 4, in multiples of 2^-60. An addition is off by
// half of that.
constexpr double kFixedUnit = 0x1p-60;

__device__ inline void add_fixed(Word* sum, double value) {
  atomicAdd(sum, static_cast<Word>(std::llrint(value * (1.0 / kFixedUnit))));
}
__device__ inline double fixed_value(Word sum) {
  return static_cast<double>(static_cast<long long>(sum)) * kFixedUnit;
}

// The largest of numbers that are not negative. They order as their bits do.
__device__ inline void add_largest(Word* largest, double value) {
  atomicMax(largest, bit_cast<Word>(value));
}

// A sum of numbers of any sign below 2^359, in digits of 40 bits. A number goes to its two highest
// digits, so it keeps 40 bits, or multiples of 2^-120.
struct WideSum {
  static constexpr int kDigits = 12, kBits = 40, kLowest = -120;
  static constexpr std::int64_t kMostTerms = std::int64_t{1} << 22;
  static constexpr double kLimit = 0x1p359;

  Word digits[kDigits];

  // Requires |value| < kLimit.
  __device__ void add(double value) {
    if (value == 0.0) return;
    const int exponent = static_cast<int>(bit_cast<std::uint64_t>(value) >> 52 & 0x7ff) - 1023;
    const int top = exponent < kLowest ? 0 : (exponent - kLowest) / kBits;
    const double scaled = value * power_of_two(-kLowest - kBits * top);  // in units of that digit
    const auto high = static_cast<long long>(scaled);
    atomicAdd(&digits[top], static_cast<Word>(high));
    if (top == 0) return;
    const double rest = (scaled - static_cast<double>(high)) * power_of_two(kBits);
    atomicAdd(&digits[top - 1], static_cast<Word>(std::llrint(rest)));
  }
  __device__ double value() const {
    double total = 0.0;
#pragma unroll
    for (int j = kDigits - 1; j >= 0; --j) {
      total += static_cast<double>(static_cast<long long>(digits[j])) *
               power_of_two(kLowest + kBits * j);
    }
    return total;
  }
};

ADAPMIXED_CORE_END
