// The likeliest tokens of a row, best first. Ties go to the lower index; masked tokens are left
// out. Exact, by unique keys. A whole block must call these functions together, unless said
// otherwise.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

// The better token has the smaller key. The upper half of a key is the logit's bits, changed so
// that they order as the logits do; the lower half is the index. V < 2^32.
constexpr std::uint64_t kNoKey = ~std::uint64_t{0};  // of a masked token; larger than any other

__device__ inline std::uint64_t token_key(float z, std::int64_t v) {
  if (!(z > -HUGE_VALF)) return kNoKey;
  const std::uint32_t bits = z == 0.0f ? 0 : bit_cast<std::uint32_t>(z);  // -0 ranks as 0
  const std::uint32_t descending = bits >> 31 != 0 ? bits : bits ^ 0x7fffffffu;
  return static_cast<std::uint64_t>(descending) << 32 | static_cast<std::uint32_t>(v);
}
__device__ inline float logit_of_key(std::uint64_t key) {
  const auto descending = static_cast<std::uint32_t>(key >> 32);
  return bit_cast<float>(descending >> 31 != 0 ? descending : descending ^ 0x7fffffffu);
}
__device__ inline std::int64_t token_of_key(std::uint64_t key) {
  return static_cast<std::uint32_t>(key);
}

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

// The digit of the key that is number `left` among the counted keys. Aligned, so that the wide load
// of a Digit in shared memory reads nothing else, which another thread may write.
struct alignas(16) Digit {
  unsigned value;
  unsigned before;  // keys with smaller digits
  unsigned same;    // keys with this digit
};

// Returns a bound such that exactly the `count` best tokens have keys at or below it. Requires
// 0 < count < the number of tokens that are not masked. Works digit by digit from the highest,
// until a digit has no more keys than are still wanted. A thread takes a digit, so there are at
// least kDigits of them.
template <Dtype D>
__device__ std::uint64_t last_key(const typename Bits<D>::type* row, std::int64_t vocab,
                                  std::int64_t count) {
  __shared__ unsigned histogram[kDigits];
  __shared__ Digit found;
  auto left = static_cast<unsigned>(count);
  std::uint64_t prefix = 0;
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    if (shift < 32 && (vocab - 1) >> shift == 0) continue;  // this digit is 0 in every index
    if (threadIdx.x < kDigits) histogram[threadIdx.x] = 0;
    __syncthreads();
    const std::uint64_t above = ~std::uint64_t{0} << shift << (kDigitBits - 1) << 1;
    for_each_token<D>(row, vocab, [&](std::int64_t v, float z) {
      const std::uint64_t key = token_key(z, v);
      if (key != kNoKey && (key & above) == prefix) {
        atomicAdd(&histogram[key >> shift & (kDigits - 1)], 1u);
      }
    });
    __syncthreads();
    const unsigned same = threadIdx.x < kDigits ? histogram[threadIdx.x] : 0;
    const unsigned before = block_prefix(same).before;
    if (before < left && left <= before + same) found = {threadIdx.x, before, same};
    __syncthreads();
    const Digit digit = found;
    prefix |= static_cast<std::uint64_t>(digit.value) << shift;
    left -= digit.before;
    if (digit.same == left) return prefix | ((std::uint64_t{1} << shift) - 1);
  }
  return prefix;
}

// Sorts in ascending order; `size` is a power of two. One thread compares each pair.
__device__ inline void block_sort(std::uint64_t* keys, std::int64_t size) {
  for (std::int64_t run = 2; run <= size; run *= 2) {
    for (std::int64_t step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (std::int64_t k = threadIdx.x; k < size / 2; k += blockDim.x) {
        const std::int64_t low = 2 * k - (k & (step - 1)), high = low + step;
        const std::uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The least power of two that is at least n.
__host__ __device__ inline std::int64_t sort_size(std::int64_t n) {
  std::int64_t size = 1;
  while (size < n) size *= 2;
  return size;
}

// Writes the keys of the `count` best tokens in order. `present`: the number of tokens that are not
// masked. `keys` has room for sort_size(count).
template <Dtype D>
__device__ void top_keys(const typename Bits<D>::type* row, std::int64_t vocab,
                         std::int64_t present, std::int64_t count, std::uint64_t* keys) {
  __shared__ unsigned filled;
  const std::uint64_t last = count < present ? last_key<D>(row, vocab, count) : kNoKey - 1;
  if (threadIdx.x == 0) filled = 0;
  const std::int64_t size = sort_size(count);
  for (std::int64_t j = count + threadIdx.x; j < size; j += blockDim.x) keys[j] = kNoKey;
  __syncthreads();
  for_each_token<D>(row, vocab, [&](std::int64_t v, float z) {
    const std::uint64_t key = token_key(z, v);
    if (key <= last) keys[atomicAdd(&filled, 1u)] = key;  // in any order
  });
  block_sort(keys, size);
}

ADAPMIXED_CORE_END
