// One vectorised pass over a row for its integer weights, then a walk through one segment.
#include "core/sampling.h"

#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

// A weight of 100 bits as three integers in doubles, of 34, 33 and 33 bits. A segment of at most
// 2^20 tokens adds each of them without rounding: exact for V <= 2^27.
struct Limbs {
  Vec high{0.0}, middle{0.0}, low{0.0};

  // The same weight as integer_weight, every step exact. The clamp gives what is no probability,
  // and will be refused, some weight that is a number.
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

}  // namespace

void add_sample(cpu::Table& table) { table.sample = sample; }
ADAPMIXED_CORE_END
