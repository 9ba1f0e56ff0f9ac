// Tokens drawn exactly in proportion to their probabilities, and normal variates, both bit for bit
// as on the CPU. Tokens: a position's blocks take a chunk each, and the last one to have done so
// draws. Integers are added exactly, so the total and the token do not depend on the order. Normal
// variates: one thread per block of the stream, eight numbers each.
#include <cstdint>
#include <cstring>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "sample/chacha.h"
#include "sample/formula.h"
#include "sample/normal.h"

ADAPMIXED_CORE_BEGIN

// The generator's key, as an argument of a kernel.
struct Key {
  alignas(4) std::uint8_t bytes[32];
};

inline Key key_of(const std::uint8_t* bytes) {
  Key key;
  std::memcpy(key.bytes, bytes, sizeof key.bytes);
  return key;
}

constexpr int kSampleThreads = 256;
constexpr int kSampleWarps = kSampleThreads / kWarp;
constexpr int kMostSampleTokens = 4;  // of a thread

// The weights of one chunk, or of some threads' share of it.
struct SampleChunk {
  uint128 weight;  // the sum of the integer weights
  double p_sum;
  // 1 if a number is no probability, or a public logit is NaN or too large; if there is q > 0; if
  // the public row's largest logit is not too small.
  std::int32_t invalid, present, usable;
};

__device__ inline uint128 shuffle_xor(uint128 value, int by) {
  const std::uint64_t high =
      __shfl_xor_sync(kAllLanes, static_cast<std::uint64_t>(value >> 64), by);
  const std::uint64_t low = __shfl_xor_sync(kAllLanes, static_cast<std::uint64_t>(value), by);
  return static_cast<uint128>(high) << 64 | low;
}

// All lanes' sums. The weights are integers, so their order is free.
__device__ inline SampleChunk warp_total(SampleChunk own) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) own.weight += shuffle_xor(own.weight, step);
  double sum[1] = {own.p_sum};
  warp_reduce(sum, Add{});
  return {own.weight, sum[0], __any_sync(kAllLanes, own.invalid) != 0,
          __any_sync(kAllLanes, own.present) != 0, __any_sync(kAllLanes, own.usable) != 0};
}

__device__ inline SampleChunk both(const SampleChunk& a, const SampleChunk& b) {
  return {a.weight + b.weight, a.p_sum + b.p_sum, a.invalid | b.invalid, a.present | b.present,
          a.usable | b.usable};
}

// The weight of the lanes of this warp before this one.
__device__ inline uint128 weight_before(uint128 weight) {
  uint128 through = weight;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint128 below = shuffle_up(through, step);
    if (lane_id() >= step) through += below;
  }
  return through - weight;
}

// One row of probabilities, cut into chunks of kSampleThreads * tokens.
template <Dtype D>
struct SampledRow {
  const double* p;
  const typename Bits<D>::type* public_row;
  std::int64_t vocab;
  int tokens, chunks;

  __device__ bool supported(std::int64_t v) const { return logit<D>(public_row, v) > -HUGE_VAL; }
  // The probability with which token v is drawn.
  __device__ double operator()(std::int64_t v) const {
    return drawn_probability(p[v], supported(v));
  }
  // The first token of this thread in a chunk, or the end of the row.
  __device__ std::int64_t first(std::int64_t chunk) const {
    const std::int64_t v = (chunk * kSampleThreads + threadIdx.x) * tokens;
    return v < vocab ? v : vocab;
  }
  __device__ std::int64_t end(std::int64_t first) const {
    return first + tokens < vocab ? first + tokens : vocab;
  }
  // The integer weight of this thread's tokens in a chunk.
  __device__ uint128 weight(std::int64_t chunk) const {
    uint128 total = 0;
    const std::int64_t begin = first(chunk), stop = end(begin);
    for (std::int64_t v = begin; v < stop; ++v) total += integer_weight((*this)(v));
    return total;
  }
};

// Draws the token of a row from its chunks. A whole block must call this together.
template <Dtype D>
__device__ void draw_token(const SampledRow<D>& row, const SampleChunk* chunks,
                           const Stream& stream, std::int64_t* token, std::int32_t* status) {
  __shared__ SampleChunk totals[kSampleWarps];
  __shared__ uint128 weights[kSampleWarps];
  __shared__ std::uint64_t words[8];
  __shared__ int chunk_found;
  __shared__ uint128 before_found;
  __shared__ std::uint64_t limbs[ExactDraw::kLimbs];
  // Each thread takes some chunks in a row.
  const int each = (row.chunks + kSampleThreads - 1) / kSampleThreads;
  const int first = each * static_cast<int>(threadIdx.x);
  const int end = first + each < row.chunks ? first + each : row.chunks;
  SampleChunk own{};
  for (int k = first; k < end; ++k) own = both(own, chunks[k]);
  // The numbers are drawn meanwhile.
  if (warp_id() == kSampleWarps - 1) {
    std::uint64_t drawn[8];
    stream.block(0, drawn);
    if (lane_id() == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i] = drawn[i];
    }
  }
  const SampleChunk of_warp = warp_total(own);
  uint128 own_before = weight_before(own.weight);
  if (lane_id() == 0) totals[warp_id()] = of_warp;
  __syncthreads();
  SampleChunk all{};
  for (int w = 0; w < kSampleWarps; ++w) {
    if (w == warp_id()) own_before += all.weight;
    all = both(all, totals[w]);
  }
  std::int32_t found = kSampled;
  if (all.invalid != 0 || all.present > all.usable || !is_total(all.p_sum)) {
    found = kNoDistribution;
  } else if (all.present == 0) {
    found = kNoSupport;
  } else if (all.weight < least_total(row.vocab)) {
    found = kNoMass;
  }
  if (threadIdx.x == 0) *status = found;
  if (found != kSampled) {
    if (threadIdx.x == 0) *token = -1;
    return;
  }
  // Every thread sees the same numbers. One finds the chunk that holds the draw, and one of that
  // chunk's threads the token. A draw at or beyond the total is left to the first thread.
  const Draws draws(all.weight);
  for (std::uint32_t number = 0;; ++number) {
    if (number > 0 && number % 4 == 0) {
      __syncthreads();  // the last words have been read
      if (threadIdx.x == 0) {
        std::uint64_t drawn[8];
        stream.block(number / 4, drawn);
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = drawn[i];
      }
      __syncthreads();
    }
    const uint128 draw = draws(words, number);
    if (draw >= all.weight + static_cast<uint128>(row.vocab)) continue;
    const bool inside = draw < all.weight;
    if (inside && draw >= own_before && draw - own_before < own.weight) {
      uint128 before = own_before;
      int k = first;
      for (; draw - before >= chunks[k].weight; ++k) before += chunks[k].weight;
      chunk_found = k;
      before_found = before;
    }
    __syncthreads();
    const uint128 weight = inside ? row.weight(chunk_found) : 0;
    uint128 before = weight_before(weight);
    if (lane_id() == kWarp - 1) weights[warp_id()] = before + weight;
    __syncthreads();
    for (int w = 0; w < warp_id(); ++w) before += weights[w];
    if (inside) before += before_found;
    bool drawn = false;
    if (inside ? draw >= before && draw - before < weight : threadIdx.x == 0) {
      std::int64_t v = -1;
      if (inside) v = token_by_weights(draw - before, row.first(chunk_found), row);
      if (v < 0) v = exact_token(ExactDraw(draw, stream, number, limbs), row.vocab, row);
      if (v >= 0) *token = v;
      drawn = v >= 0;
    }
    if (__syncthreads_or(drawn) != 0) return;
  }
}

// One block takes one chunk of one position. The counters (B) are 0.
template <Dtype D>
__global__ void __launch_bounds__(kSampleThreads, 3)
    sample_kernel(const double* probabilities, const __grid_constant__ Logits public_logits,
                  std::int64_t vocab, int tokens_each, int chunk_count,
                  const __grid_constant__ Key key, std::uint64_t counter, SampleChunk* all_chunks,
                  unsigned* counters, std::int64_t* tokens, std::int32_t* status) {
  __shared__ SampleChunk totals[kSampleWarps];
  const std::int64_t b = blockIdx.x / static_cast<unsigned>(chunk_count);
  const int chunk = static_cast<int>(blockIdx.x % static_cast<unsigned>(chunk_count));
  const SampledRow<D> row{probabilities + b * vocab, row_bits<D>(public_logits, 0, b), vocab,
                          tokens_each, chunk_count};
  SampleChunk* chunks = all_chunks + b * chunk_count;
  // Neighbouring threads read neighbouring tokens here: a sum needs no order.
  const std::int64_t begin = static_cast<std::int64_t>(chunk) * kSampleThreads * tokens_each;
  double p[kMostSampleTokens];
  float z0[kMostSampleTokens];
#pragma unroll
  for (int k = 0; k < kMostSampleTokens; ++k) {
    const std::int64_t v = begin + k * kSampleThreads + threadIdx.x;
    const bool there = k < tokens_each && v < vocab;
    p[k] = there ? row.p[v] : 0.0;
    z0[k] = there ? logit<D>(row.public_row, v) : -HUGE_VALF;
  }
  SampleChunk own{};
#pragma unroll
  for (int k = 0; k < kMostSampleTokens; ++k) {
    own.p_sum += p[k];
    own.present |= z0[k] > -HUGE_VALF;
    own.usable |= z0[k] >= -kMaxLogit;
    if (!is_probability(p[k]) || !(z0[k] <= kMaxLogit)) {
      own.invalid = 1;
    } else if (z0[k] > -HUGE_VALF) {
      own.weight += integer_weight(p[k]);
    }
  }
  own = warp_total(own);
  if (lane_id() == 0) totals[warp_id()] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kSampleWarps; ++w) own = both(own, totals[w]);
    chunks[chunk] = own;
  }
  if (!is_last_block(counters + b, static_cast<unsigned>(chunk_count))) return;
  const Stream stream{key.bytes, counter, static_cast<std::uint32_t>(b)};
  draw_token<D>(row, chunks, stream, tokens + b, status + b);
}

constexpr int kGaussianThreads = 128;

static __global__ void gaussian_kernel(Key key, std::uint64_t counter, double sigma,
                                       std::int64_t count, double* result) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGaussianThreads + threadIdx.x;
  if (8 * index >= count) return;
  // First the blocks of one lane, then those of the next.
  const Stream stream{key.bytes, counter, static_cast<std::uint32_t>(index >> 32)};
  std::uint64_t words[8];
  stream.block(static_cast<std::uint32_t>(index), words);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const NormalPair<double> pair = normal_pair(words[i], words[i + 1]);
    const std::int64_t at = 8 * index + i;
    if (at < count) result[at] = sigma * pair.first;
    if (at + 1 < count) result[at + 1] = sigma * pair.second;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace {

std::int64_t tokens_each() { return simulated_or(device::kMostSampleTokens, 1); }

std::int64_t chunks_of(std::int64_t vocab) {
  const std::int64_t length = device::kSampleThreads * tokens_each();
  return (vocab + length - 1) / length;
}

}  // namespace

static std::int64_t sample_workspace(std::int64_t positions, std::int64_t vocab) {
  const std::int64_t chunks = chunks_of(vocab) * std::int64_t{sizeof(device::SampleChunk)};
  return positions * (chunks + std::int64_t{sizeof(unsigned)});
}

static void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
                   std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
                   std::int64_t* tokens, std::int32_t* status, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t chunks = chunks_of(vocab);
  auto* memory = static_cast<device::SampleChunk*>(queue.workspace);
  auto* counters = reinterpret_cast<unsigned*>(memory + positions * chunks);
  const dim3 grid = grid_of(positions * chunks);
  clear(queue, counters, positions);
  with_dtype(public_logits.dtype, [&](auto dtype) {
    launch(queue, device::sample_kernel<decltype(dtype)::value>, grid, dim3(device::kSampleThreads),
           0, probabilities, public_logits, vocab, static_cast<int>(tokens_each()),
           static_cast<int>(chunks), device::key_of(key), counter, memory, counters, tokens,
           status);
  });
}

static void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma,
                     std::int64_t count, double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t per_block = 8 * device::kGaussianThreads;
  launch(queue, device::gaussian_kernel, grid_of((count + per_block - 1) / per_block),
         dim3(device::kGaussianThreads), 0, device::key_of(key), counter, sigma, count, result);
}

void add_sample(Table& table) {
  table.gaussian = gaussian;
  table.sample = sample;
  table.sample_workspace = sample_workspace;
}

}  // namespace adapmixed::cuda
