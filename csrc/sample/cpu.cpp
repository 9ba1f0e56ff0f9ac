// Tokens: one vectorised pass over a row computes its integer weights, then a scalar search looks
// through one segment. Normal variates and the stream itself: several ChaCha20 blocks at a time.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/config.h"
#include "common/operators.h"
#include "common/parallel.h"
#include "common/rows.h"
#include "common/simd.h"
#include "sample/chacha.h"
#include "sample/formula.h"
#include "sample/normal.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Consecutive ChaCha20 blocks that are computed at once.
#if defined(__AVX512F__)
constexpr int kBlocks = 16;
#elif defined(__AVX2__)
constexpr int kBlocks = 8;
#else
constexpr int kBlocks = 4;  // every 64-bit processor has 128-bit registers
#endif

// A state word of all these blocks, in the vector extension of g++ and clang: +, ^, << and >> act
// on each lane.
typedef std::uint32_t Wide __attribute__((vector_size(4 * kBlocks)));

// Computes words 0 to 15 of the blocks first .. first + kBlocks - 1 of one call. The upper half of
// the index is the lane, so a group may cross from one lane into the next.
inline void chacha20_blocks(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
                            Wide* out) {
  std::uint32_t same[16];
  chacha20_key_words(key, same);
  same[13] = static_cast<std::uint32_t>(counter);
  same[14] = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t block[kBlocks], lane[kBlocks];
  for (int j = 0; j < kBlocks; ++j) {
    const std::uint64_t index = first + static_cast<std::uint64_t>(j);
    block[j] = static_cast<std::uint32_t>(index);
    lane[j] = static_cast<std::uint32_t>(index >> 32);
  }
  Wide blocks, lanes;
  std::memcpy(&blocks, block, sizeof blocks);
  std::memcpy(&lanes, lane, sizeof lanes);
  for (int i = 0; i < 15; ++i) out[i] = Wide{} + same[i];
  out[12] = blocks;
  out[15] = lanes;
  chacha20_rounds(out);
  for (int i = 0; i < 15; ++i) {
    if (i != 12) out[i] += same[i];
  }
  out[12] += blocks;
  out[15] += lanes;
}

// A weight of 100 bits as three integers in doubles, of 34, 33 and 33 bits. A segment of at most
// 2^20 tokens adds each of them without rounding: exact for V <= 2^27.
struct Limbs {
  Vec high{0.0}, middle{0.0}, low{0.0};

  // Adds the same weight as integer_weight; every step is exact. The clamp gives a number that is
  // not a probability some finite weight; the row will be rejected.
  void add(Vec p, Mask supported) {
    const Vec clamped = vmin(vmax(p, Vec(0.0)), Vec(1.0 + 1e-6));
    const Vec x = vselect(supported, clamped, Vec(0.0)) * Vec(0x1p34);
    const Vec h = vtrunc(x);
    const Vec y = (x - h) * Vec(0x1p33);
    const Vec m = vtrunc(y);
    high = high + h;
    middle = middle + m;
    low = low + vtrunc((y - m) * Vec(0x1p33));
  }
  uint128 total() const {
    const auto integer = [](Vec x) {
      return static_cast<uint128>(static_cast<std::uint64_t>(sum(x)));
    };
    return (integer(high) << 66) + (integer(middle) << 33) + integer(low);
  }
};

constexpr std::int64_t kSegments = 128;

// Lanes at or beyond `end` read as 0.
inline Vec load_probabilities(const double* p, std::int64_t v, std::int64_t end) {
  if (v + Vec::kLanes <= end) return Vec::load(p + v);
  double lanes[Vec::kLanes] = {};
  for (int i = 0; v + i < end; ++i) lanes[i] = p[v + i];
  return Vec::load(lanes);
}

template <Dtype D>
std::int32_t sample_row(const double* p, const Row& row, std::int64_t vocab, const Stream& stream,
                        std::int64_t* token) {
  const std::int64_t length = round_up((vocab + kSegments - 1) / kSegments, 64);
  uint128 weight[kSegments];
  uint128 total = 0;
  Vec p_sum(0.0);
  bool supported_anywhere = false;
  *token = -1;
  for (std::int64_t s = 0; s * length < vocab; ++s) {
    const std::int64_t end = std::min(vocab, (s + 1) * length);
    Limbs limbs;
    Mask valid = Vec(0.0) == Vec(0.0), present = Vec(0.0) < Vec(0.0);
    for (std::int64_t v = s * length; v < end; v += Vec::kLanes) {
      const Vec x = load_probabilities(p, v, end);
      const Mask supported = load_logits<D>(row.data, v, end) > Vec(-HUGE_VAL);
      valid = valid & is_probability(x);
      present = present | supported;
      p_sum = p_sum + x;
      limbs.add(x, supported);
    }
    if (valid.bits() != (1u << Vec::kLanes) - 1) return kNoDistribution;
    supported_anywhere = supported_anywhere || present.any();
    weight[s] = limbs.total();
    total += weight[s];
  }
  if (!is_total(sum(p_sum))) return kNoDistribution;
  if (!supported_anywhere) return kNoSupport;
  if (total < least_total(vocab)) return kNoMass;
  const auto probability = [&](std::int64_t v) {
    return drawn_probability(p[v], row.at(v) > -HUGE_VAL);
  };
  const Draws draws(total);
  for (std::uint32_t number = 0; *token < 0; ++number) {
    const uint128 draw = draws(stream, number);
    if (draw < total) {
      uint128 left = draw;
      std::int64_t s = 0;
      for (; left >= weight[s]; ++s) left -= weight[s];
      *token = token_by_weights(left, s * length, probability);
    }
    if (*token < 0 && draw < total + static_cast<uint128>(vocab)) {
      std::uint64_t limbs[ExactDraw::kLimbs];
      *token = exact_token(ExactDraw(draw, stream, number, limbs), vocab, probability);
    }
  }
  return kSampled;
}

void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
            std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
            std::int64_t* tokens, std::int32_t* status, int threads) {
  cpu::parallel_for(positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const Row row = row_of(public_logits, 0, b);
      const Stream stream{key, counter, static_cast<std::uint32_t>(b)};
      with_dtype(row.dtype, [&](auto tag) {
        status[b] = sample_row<decltype(tag)::value>(probabilities + b * vocab, row, vocab, stream,
                                                     tokens + b);
      });
    }
  });
}

// Normal variates, several blocks of the stream at a time.

constexpr std::int64_t kGroup = 8 * kBlocks;  // numbers made from one group of blocks

// The upper 53 bits of one 64-bit word of every block.
struct UpperBits {
  alignas(64) std::uint32_t low[kBlocks], high[kBlocks];

  explicit UpperBits(const Wide* words) {
    const Wide shifted = words[0] >> 11;
    std::memcpy(low, &shifted, sizeof shifted);
    std::memcpy(high, words + 1, sizeof shifted);
  }
  Vec load(int block) const {
    return vfma(load_u32(high + block), Vec(0x1p21), load_u32(low + block));  // exact
  }
};

// Writes the first `count` <= kGroup numbers from block `first` on.
void one_group(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first, double sigma,
               std::int64_t count, double* result) {
  Wide words[16];
  chacha20_blocks(key, counter, first, words);
  const int blocks = static_cast<int>((count + 7) / 8);
  alignas(64) double normals[8][kBlocks];
  for (int i = 0; i < 8; i += 2) {
    const UpperBits a(words + 2 * i), b(words + 2 * i + 2);
    for (int j = 0; j < blocks; j += Vec::kLanes) {
      const NormalPair<Vec> pair = box_muller(a.load(j), b.load(j));
      (Vec(sigma) * pair.first).store(normals[i] + j);
      (Vec(sigma) * pair.second).store(normals[i + 1] + j);
    }
  }
  if (count == kGroup) {
    for (int j = 0; j < kBlocks; ++j) {
      for (int i = 0; i < 8; ++i) result[8 * j + i] = normals[i][j];
    }
  } else {
    for (std::int64_t k = 0; k < count; ++k) result[k] = normals[k % 8][k / 8];
  }
}

void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, int threads) {
  const std::int64_t groups = (count + kGroup - 1) / kGroup;
  // Fewer numbers than this are not worth waking a thread.
  const std::int64_t grain = 8192 / kGroup;
  cpu::parallel_for(groups, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      one_group(key, counter, static_cast<std::uint64_t>(g * kBlocks), sigma,
                std::min(kGroup, count - g * kGroup), result + g * kGroup);
    }
  });
}

// Consecutive blocks as bytes, so that tests see the stream from which the operators draw.
void keystream(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
               std::int64_t count, std::uint8_t* result) {
  for (std::int64_t k = 0; k < count; k += kBlocks) {
    Wide words[16];
    chacha20_blocks(key, counter, first + static_cast<std::uint64_t>(k), words);
    const std::int64_t blocks = std::min<std::int64_t>(kBlocks, count - k);
    for (std::int64_t j = 0; j < blocks; ++j) {
      for (int i = 0; i < 64; ++i) {
        result[64 * (k + j) + i] = static_cast<std::uint8_t>(words[i / 4][j] >> (8 * (i % 4)));
      }
    }
  }
}

}  // namespace

void add_sample(cpu::Table& table) {
  table.sample = sample;
  table.gaussian = gaussian;
  table.keystream = keystream;
}

ADAPMIXED_CORE_END
