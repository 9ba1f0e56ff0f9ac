// Large targets T = e^{(alpha-1) R}: only the few tokens with q r^alpha near T or above can decide.
// They are found by their scores (cuda_scores.cuh) and kept in shared memory.
#pragma once

#include "common/float_ratio.h"
#include "common/row_pair.cuh"
#include "project/cuda_block_row.cuh"
#include "project/cuda_scores.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// Lists have some hundred tokens: many blocks of few threads overlap their waiting.
constexpr int kListThreads = 64;
constexpr int kListWarps = kListThreads / kWarp;
constexpr int kListBlocks = 6;  // that a multiprocessor has room for
// The tokens of both lists together, for each warp.
constexpr int kListCapacity = 1536;

struct alignas(8) ListedToken {
  float z, z0;
};

// Those on the list of this warp.
struct ListTokens {
  static constexpr bool kWild = false;

  const ListedToken* tokens;
  int count;
  double public_lse, shift;  // as in RowPair

  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int k = lane_id(); k < count; k += kWarp) {
      const double z = tokens[k].z, z0 = tokens[k].z0;
      visit(z0 - public_lse, z - z0 - shift);
    }
  }
};

template <Dtype D>
class BlockLists {
 public:
  using Row = BlockRow<ListTokens>;

  // scores: those of the row. public_parts: of its position. memory: shared memory of this warp,
  // for kListCapacity tokens.
  __device__ BlockLists(const RowPair<D>& pair, const RowParts& cut, const std::uint32_t* scores,
                        const RowPart* public_parts, double order, double log_target,
                        ListedToken* memory)
      : pair_(pair),
        cut_(cut),
        scores_(scores),
        public_parts_(public_parts),
        order_(order),
        log_target_(log_target),
        memory_(memory) {}

  // Empties the lists.
  __device__ void set_unlisted(double unlisted) {
    threshold_ = list_threshold(log_target_, unlisted, pair_.vocab);
    used_ = 0;
  }

  // Return false if too many tokens matter, or if a wild token does.
  __device__ bool list_forward() {
    if (!list(false, forward_)) return false;
    forward_.survey(log_target_);
    return true;
  }
  __device__ bool list_reverse() { return list(true, reverse_); }

  // Whether the public row masks a token that the private row has; known from list_forward().
  __device__ bool uncovers() const { return uncovers_; }

  __device__ const Row& forward() const { return forward_; }
  __device__ const Row& reverse() const { return reverse_; }

 private:
  static constexpr int kWordsAtOnce = 8, kHitsAtOnce = 4;  // loads that are on their way together

  // A list under construction: where this warp's tokens go, and what was seen on the way.
  struct Draft {
    double s;  // log q + s log r counts
    ListedToken* tokens;
    int room, count = 0;
    bool uncovers = false, wild = false;
  };

  // Each warp lists tokens of its own stretches, in the row's order: the same on every run.
  __device__ bool list(bool reverse, Row& out) {
    Draft draft{reverse ? 1.0 - order_ : order_, memory_ + used_, kListCapacity - used_};
    const int stretches = cut_.stretches(), items = cut_.count * stretches;
    for (int first = warp_id(); first < items; first += kWordsAtOnce * kListWarps) {
      const int mine = first + lane_id() * kListWarps;
      const float bound = mine < items ? least_score(draft.s, mine / stretches) : HUGE_VALF;
      const std::uint32_t* words = scores_ + std::int64_t{first} * kWarp + lane_id();
      float score[kWordsAtOnce];
#pragma unroll
      for (int k = 0; k < kWordsAtOnce; ++k) {
        const std::uint32_t word = first + k * kListWarps < items ? words[k * kListThreads] : 0;
        score[k] = float_of<Dtype::bf16>(reverse ? word >> 16 : word & 0xffffu);
      }
      unsigned hits = 0;  // of the stretch `mine`, by the lanes that summed up a group
#pragma unroll
      for (int k = 0; k < kWordsAtOnce; ++k) {
        const float least = __shfl_sync(kAllLanes, bound, k);
        const unsigned found = __ballot_sync(kAllLanes, score[k] >= least);
        if (lane_id() == k) hits = found;
      }
      unsigned hit = __ballot_sync(kAllLanes, hits != 0);
      for (; hit != 0; hit &= hit - 1) {
        const int k = __ffs(static_cast<int>(hit)) - 1;
        look(first + k * kListWarps, __shfl_sync(kAllLanes, hits, k), draft);
      }
    }
    uncovers_ = __syncthreads_or(draft.uncovers) != 0 || uncovers_;
    const bool fits = __syncthreads_or(draft.wild || draft.count > draft.room) == 0;
    if (uncovers_ || !fits) return false;  // no further list is made after this
    out = Row({draft.tokens, draft.count, pair_.public_lse, pair_.shift}, order_);
    used_ += draft.count;
    return true;
  }

  // Groups with a smaller score have no token that matters; nor one that the public row alone
  // masks, whose score is +inf.
  __device__ float least_score(double s, int part) const {
    const double wanted = threshold_ + pair_.public_lse + s * pair_.shift;
    const double far = order_ * public_parts_[part].high;
    const double slack = 1e-3 + 4.0 * kFloatUnit * (std::fabs(wanted) + far);
    return far < 1e30 ? static_cast<float>(wanted - slack) : -HUGE_VALF;
  }

  // Lists tokens of the hit groups of one stretch. A whole warp must call this together.
  __device__ void look(int stretch, unsigned hits, Draft& draft) const {
    // The token of the group of lane 0 that this lane looks at.
    const std::int64_t own = static_cast<std::int64_t>(stretch) * kStretch + lane_id() * kWarp;
    while (hits != 0) {
      ListedToken token[kHitsAtOnce];
#pragma unroll
      for (int k = 0; k < kHitsAtOnce; ++k) {
        const std::int64_t v = own + __ffs(static_cast<int>(hits)) - 1;
        const bool there = hits != 0 && v < pair_.vocab;
        hits &= hits - 1;
        token[k].z = there ? logit<D>(pair_.private_row, v) : -HUGE_VALF;
        token[k].z0 = there ? logit<D>(pair_.public_row, v) : -HUGE_VALF;
      }
#pragma unroll
      for (int k = 0; k < kHitsAtOnce; ++k) {
        const double z = token[k].z, z0 = token[k].z0;
        // If both rows mask the token, t is NaN, and nothing changes.
        const double log_q = z0 - pair_.public_lse, t = z - z0 - pair_.shift, gain = draft.s * t;
        // Half a nat, so rather too many tokens matter; and the rounding of logits far from 0.
        const double slack = 0.5 + 1e-15 * (std::fabs(log_q) + std::fabs(gain));
        const bool matters = log_q + gain > threshold_ - slack;
        draft.uncovers = draft.uncovers || t == HUGE_VAL;
        draft.wild = draft.wild || (matters && log_q < kWildLogQ);
        const unsigned all = __ballot_sync(kAllLanes, matters);
        const int at = draft.count + __popc(all & ((1u << lane_id()) - 1u));
        if (matters && at < draft.room) draft.tokens[at] = token[k];
        if (draft.count <= draft.room) draft.count += __popc(all);  // no row can overflow it
      }
    }
  }

  const RowPair<D>& pair_;
  const RowParts& cut_;
  const std::uint32_t* scores_;
  const RowPart* public_parts_;
  double order_, log_target_, threshold_ = 0.0;
  ListedToken* memory_;
  int used_ = 0;
  bool uncovers_ = false;
  Row forward_, reverse_;
};

ADAPMIXED_CORE_END
