// A private row on a GPU. A block computes p/q and q anew for each evaluation: reading stored
// values would cost as much L2 bandwidth as computing them costs arithmetic. All threads of a block
// call each member together, and get the same results.
#pragma once

#include "common/block.cuh"
#include "common/float_ratio.h"
#include "common/load.cuh"
#include "common/row_parts.cuh"
#include "project/terms.h"

ADAPMIXED_CORE_BEGIN

// Large targets: which tokens of a row can matter, from one read of the row that needs no
// log-sum-exp yet.
//
// log q + s log r is S - lse_0 - s (lse - lse_0) with the score S = s z + (1 - s) z_0, s = order or
// 1 - order. The first kernel computes scores in floats and leaves the largest of each kind for
// every kAtOnce tokens. The second knows the log-sum-exps and looks only at tokens of such a group
// whose largest score comes near its threshold.
//
// Rounding, in units (kFloatUnit): two products, their factors and a sum move S by at most
// 2 |S| + 3 order Z, Z the largest |z_0| near the group. The threshold is rounded once.
// 4 |threshold| + 4 order Z are allowed for.

// The upper half of a float, rounded up; +-inf stays what it is.
ADAPMIXED_HD std::uint32_t upper_half(float x) {
  const auto bits = bit_cast<std::uint32_t>(x);
  return (x > 0.0f ? bits + 0xffffu : bits) >> 16;
}

// For row_parts_kernel. A part of the public row gets its largest |z_0|, masked tokens aside.
struct ScoreLook {
  // That a multiprocessor has room for.
  static constexpr int blocks(Dtype dtype) { return dtype == Dtype::f32 ? 3 : 4; }
  struct alignas(8) Other {
    float of_forward, of_reverse;  // (1 - s) z_0
  };
  struct Found {
    float forward = -HUGE_VALF, reverse = -HUGE_VALF;
  };

  float forward, reverse;  // s, each rounded by itself
  std::uint32_t* scores;

  __device__ Other other(float z0) const { return {reverse * z0, forward * z0}; }
  // A token that both rows mask has the score NaN, which changes nothing. One that the public row
  // alone masks has +inf.
  __device__ void see(Found& found, float z, const Other& z0) const {
    found.forward = std::fmax(found.forward, vfma(z, forward, z0.of_forward));
    found.reverse = std::fmax(found.reverse, vfma(z, reverse, z0.of_reverse));
  }
  __device__ void leave(Found& found, std::int64_t at) const {
    scores[at + lane_id()] = upper_half(found.forward) | upper_half(found.reverse) << 16;
    found = {};
  }
  template <Dtype D>
  __device__ void finish(const Found&, const typename Bits<D>::type*, int, const Other*,
                         RowPart&) const {}
  template <Dtype D>
  __device__ void finish_public(const typename Bits<D>::type* row, int size, RowPart& part) const {
    double largest[1] = {0.0};
    for (int v = lane_id(); v < size; v += kWarp) {
      const float z0 = logit<D>(row, v);
      if (z0 > -HUGE_VALF) largest[0] = vmax(static_cast<double>(std::fabs(z0)), largest[0]);
    }
    warp_reduce(largest, Max{});
    part.high = largest[0];
  }
  __device__ void begin(std::int64_t) const {}
};

// A thread takes so many tokens at a time, so that their latencies overlap.
constexpr int kPack = 4;
using Pack = Several<float, kPack>;

// The scores of a row.
struct RowScores {
  const std::uint32_t* words;
  const RowPart* public_parts;
  int stretches, of_part;  // of the row, and of a part of it
};
constexpr int kMostStretches = (1 << 20) / kStretch;

template <Dtype D, bool kScaled>
class BlockRow {
 public:
  using Float = Pack;
  using Word = typename Bits<D>::type;

  __device__ BlockRow(const Word* row, double lse, const Word* public_row, double public_lse,
                      std::int64_t vocab, const ProjectTarget& target, const RowScores& scores)
      : row_(row),
        public_row_(public_row),
        vocab_(static_cast<int>(vocab)),
        lse_(lse),
        public_lse_(public_lse),
        target_(target),
        scores_(scores) {
    const double centre = centre_of(lse), public_centre = centre_of(public_lse);
    shift_ = make_shift(lse - centre, public_lse - public_centre);
    public_shift_ = make_shift(public_lse - public_centre, 0.0);
    centre_ = static_cast<float>(centre), public_centre_ = static_cast<float>(public_centre);
    top_ = static_cast<float>(public_lse - public_centre);
    rest_ = static_cast<float>((public_lse - public_centre) * kOctavesPerNat - public_shift_.c);
    log2_target_ = static_cast<float>(target.log_target * kLog2e);
  }

  __device__ double scale() const { return 1.0 + shift_.residual; }
  __device__ double offset() const { return shift_.residual; }
  __device__ RowRange range() const {
    return {scale() * low_ + offset(), refused_ ? HUGE_VAL : scale() * high_ + offset(),
            target_.log_target - least_log_q_};
  }
  // Whether tokens were met that are in no sum and that the public row does not mask.
  __device__ bool rare() const { return rare_; }

  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for_tokens([&](const float*, const float*, Pack mass, Pack d) { visit(mass, d); });
  }
  __device__ void add_up(double (&sums)[6]) const {
    if (!kScaled || any_) block_sum(sums);
  }

  __device__ Moments load() {
    BlockSum<Pack> second, third, fourth;
    look([&](Pack q, Pack d) {
      const Pack first = q * d, square = first * d;
      second.add(first, d), third.add(square, d), fourth.add(square * d, d);
      second.widen(), third.widen(), fourth.widen();
    });
    double sums[3] = {sum(second.total), sum(third.total), sum(fourth.total)};
    block_sum(sums);
    return {sums[0], sums[1], sums[2]};
  }

  // Chooses groups with a token that can matter for any lambda: X^s <= max(1, r^s). Smaller terms
  // than kLeftOut / V are left out.
  __device__ void select(double s, double) {
    const double threshold = target_.log_target + std::log(kLeftOut / vocab_);
    const double wanted = threshold + public_lse_ + s * (lse_ - public_lse_);
    bool any = false;
#pragma unroll 4
    for (int stretch = warp_id(); stretch < scores_.stretches; stretch += warp_count()) {
      const double far = target_.order * scores_.public_parts[stretch / scores_.of_part].high;
      const double slack = 1e-3 + 4.0 * kFloatUnit * (std::fabs(wanted) + far);
      const float least = far < 1e30 ? static_cast<float>(wanted - slack) : -HUGE_VALF;
      const std::uint32_t word = scores_.words[stretch * kWarp + lane_id()];
      const float score = float_of<Dtype::bf16>(s < 0.0 ? word >> 16 : word & 0xffffu);
      const unsigned hit = __ballot_sync(kAllLanes, score >= least);
      if (lane_id() == 0) groups()[stretch] = hit;
      any = any || hit != 0;
    }
    any_ = __syncthreads_or(any) != 0;
    low_ = high_ = 0.0;
    if (any_) look([](Pack, Pack) {});
  }

 private:
  static constexpr int kManyGroups = 16;  // with more than these, all of a stretch is read

  // The groups that count, a bit for each, of every stretch.
  __device__ static unsigned* groups() {
    __shared__ unsigned words[kScaled ? kMostStretches : 1];
    return words;
  }

  // Visits the tokens for the first time: finds the range of d, and rows that are refused.
  template <class Visit>
  __device__ void look(const Visit& visit) {
    float low = 0.0f, high = 0.0f, least = top_;
    bool refuse = false, rare = false;
    for_tokens([&](const float* z, const float* z0, Pack mass, Pack d) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        low = std::fmin(d.v[k], low), high = std::fmax(d.v[k], high);
        const float read = z0[k] - public_centre_;
        if (read > top_ + static_cast<float>(kRareLogQ)) {
          least = std::fmin(read, least);
          continue;
        }
        refuse = refuse || refused(z[k] - lse_, z0[k] - public_lse_);
        rare = rare || z0[k] - public_lse_ > kMaskedLog;
      }
      visit(mass, d);
    });
    double ends[3] = {-static_cast<double>(low), static_cast<double>(high),
                      static_cast<double>(top_ - least)};
    block_reduce(ends, Max{});
    low_ = -ends[0], high_ = ends[1], least_log_q_ = -ends[2];
    refused_ = __syncthreads_or(refuse) != 0;
    rare_ = __syncthreads_or(rare) != 0 || rare_;
  }

  // Calls visit(z, z0, q or log2(q / T), d') for this thread's tokens, kPack at a time.
  template <class Visit>
  __device__ void for_tokens(const Visit& visit) const {
    if constexpr (kScaled) {
      for (int stretch = warp_id(); any_ && stretch < scores_.stretches; stretch += warp_count()) {
        unsigned hit = groups()[stretch];
        // Token `at` of a stretch is in group at % kWarp. Of a few groups, a lane takes one token
        // each; of many, the lanes read all tokens, side by side.
        const bool all = __popc(hit) > kManyGroups;
        if (all) hit = kAllLanes;
        for (; hit != 0;) {
          float z[kPack], z0[kPack];
#pragma unroll
          for (int k = 0; k < kPack; ++k) {
            const int bit = __ffs(static_cast<int>(hit)) - 1;
            const int at = all ? bit * kWarp + lane_id() : lane_id() * kWarp + bit;
            const int v = stretch * kStretch + at;
            const bool there = hit != 0 && v < vocab_;
            hit &= hit - 1;
            z[k] = there ? logit<D>(row_, v) : -HUGE_VALF;
            z0[k] = there ? logit<D>(public_row_, v) : -HUGE_VALF;
          }
          visit_pack(z, z0, visit);
        }
      }
    } else {
      const int stride = static_cast<int>(blockDim.x) * kPack;
      for (int v = warp_id() * kWarp * kPack + lane_id(); v < vocab_; v += stride) {
        float z[kPack], z0[kPack];
        load_tokens<D>(row_ + v, vocab_ - v, z);
        load_tokens<D>(public_row_ + v, vocab_ - v, z0);
        visit_pack(z, z0, visit);
      }
    }
  }

  template <class Visit>
  __device__ void visit_pack(const float (&z)[kPack], const float (&z0)[kPack],
                             const Visit& visit) const {
    Pack mass, d;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const bool present = z0[k] - public_centre_ > top_ + static_cast<float>(kRareLogQ);
      const float read = present ? z0[k] - public_centre_ : top_;
      const FloatToken token = split_token(read);
      const float a = token.grid + shift_.c;
      // p/q is kept above e^-25.
      const float private_z = vmax(vfma(a, 1.0f / kOctavesPerNat, -25.0f), z[k] - centre_);
      d.v[k] = present ? ratio_excess(private_z, a, token.rest) : 0.0f;
      if constexpr (kScaled) {
        const float octaves = (token.grid - public_shift_.c) + (token.rest - rest_);
        mass.v[k] = present ? vfma(octaves, kOctaveInverse, -log2_target_) : 2.0f * kNoShare;
      } else {
        const float q = probability(vmax(read, top_ - 80.0f), public_shift_);
        mass.v[k] = present ? q * static_cast<float>(1.0 + public_shift_.residual) : 0.0f;
      }
    }
    visit(z, z0, mass, d);
  }

  const Word *row_, *public_row_;
  int vocab_;
  double lse_, public_lse_;
  const ProjectTarget& target_;
  RowScores scores_;
  FloatShift shift_, public_shift_;
  float centre_, public_centre_, top_, rest_, log2_target_;
  double low_ = 0.0, high_ = 0.0, least_log_q_ = 0.0;
  bool refused_ = false, rare_ = false, any_ = true;
};

ADAPMIXED_CORE_END
