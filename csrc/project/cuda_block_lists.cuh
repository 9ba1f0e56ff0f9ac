// Large targets T = e^{(alpha-1) R}: only the few tokens with q r^alpha near T or above can decide.
// They are found by their scores (cuda_scores.cuh) and kept in shared memory.
#pragma once

#include "common/float_ratio.h"
#include "common/row_pair.cuh"
#include "project/cuda_block_row.cuh"
#include "project/cuda_scores.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// Few threads, since all of them search; enough for the thousands of tokens of a long list.
constexpr int kListThreads = 128;
constexpr int kListWarps = kListThreads / kWarp;
constexpr int kListBlocks = 4;         // that a multiprocessor has room for
constexpr int kListBytes = 52 * 1024;  // of dynamic shared memory

// The logits' own bits.
template <Dtype D>
struct alignas(2 * sizeof(typename Bits<D>::type)) ListedToken {
  typename Bits<D>::type z, z0;
};
// The tokens of a list, for each warp.
template <Dtype D>
constexpr int kListCapacity = kListBytes / kListWarps / static_cast<int>(sizeof(ListedToken<D>));

// A list under construction: where this warp's tokens go, and what was seen on the way.
template <Dtype D>
struct ListDraft {
  ListedToken<D>* tokens;
  int room, count = 0;
  bool uncovers = false, wild = false, exceeds = false;
};

// Tells which tokens of a row matter: s = order or 1 - order, and log q + s log r counts. In shared
// memory, so that it takes no registers while the search runs.
template <Dtype D>
struct ListSource {
  RowPair<D> pair;
  const RowPart* public_parts;
  double order, log_target, threshold;
  int stretches, of_part;  // of the row, and of a part of it
  float least_logit;       // no wild token's public logit is larger
  // For each warp: how many tokens its list has; whether the lists of all warps are empty, and
  // whether all fit their memory.
  struct Kept {
    int count;
    bool none, fit;
  } kept[kListWarps];

  // A whole block must call these together.
  __device__ void set(const RowPair<D>& row, const RowParts& cut, const RowPart* parts,
                      double order_, double log_target_) {
    if (threadIdx.x == 0) {
      pair = row;
      public_parts = parts;
      order = order_;
      log_target = log_target_;
      of_part = cut.stretches();
      stretches = cut.count * of_part;
      const double least = row.public_lse + kWildLogQ;
      least_logit = static_cast<float>(least + 1e-3 + 1e-6 * std::fabs(row.public_lse));
    }
    __syncthreads();
  }
  __device__ void set_threshold(double value) {
    __syncthreads();  // the last one has been read
    if (threadIdx.x == 0) threshold = value;
    __syncthreads();
  }

  // Tokens of a stretch with a smaller score do not matter. One that the public row alone masks has
  // the score +inf. rough: too many tokens have that score.
  struct Least {
    float score;
    bool rough;
  };
  // About the score of a token whose term is T at lambda = 1.
  __device__ float score_at_target(bool reverse) const {
    return static_cast<float>(log_target + pair.public_lse + power(reverse) * pair.shift);
  }
  __device__ Least least_score(bool reverse, int stretch) const {
    const double s = power(reverse);
    const double wanted = threshold + pair.public_lse + s * pair.shift;
    const double far = order * public_parts[stretch / of_part].high;
    const double slack = 1e-3 + 4.0 * kFloatUnit * (std::fabs(wanted) + far);
    return {far < 1e30 ? static_cast<float>(wanted - slack) : -HUGE_VALF, !(slack < 0.25)};
  }

  // Lists those tokens of one stretch that matter. steps: which of them this lane looks at, one for
  // each bit; across: whether neighbouring lanes look at neighbouring tokens, or a lane's steps are
  // neighbours (a bit is then a group of cuda_scores.cuh). kTake: loads that a lane has on their
  // way together, of each row. A whole warp must call this together.
  template <int kTake>
  __device__ void look(bool reverse, int stretch, unsigned steps, bool across, const Least& least,
                       ListDraft<D>& draft) const {
    using Word = typename Bits<D>::type;
    const std::int64_t begin = static_cast<std::int64_t>(stretch) * kStretch;
    const std::int64_t rest = pair.vocab - begin;
    const int left = rest < kStretch ? static_cast<int>(rest) : kStretch;
    const Word *private_row = pair.private_row + begin, *public_row = pair.public_row + begin;
    const int own = across ? lane_id() : lane_id() * kWarp, stride = across ? kWarp : 1;
    // As the first kernel rounds them.
    const float by_private = static_cast<float>(power(reverse));
    const float by_public = static_cast<float>(power(!reverse));
    const float at_target = score_at_target(reverse);
    while (steps != 0) {
      ListedToken<D> token[kTake];
#pragma unroll
      for (int k = 0; k < kTake; ++k) {
        const int at = own + (__ffs(static_cast<int>(steps)) - 1) * stride;
        const bool there = steps != 0 && at < left;
        steps &= steps - 1;
        token[k].z = there ? private_row[at] : Bits<D>::kMasked;
        token[k].z0 = there ? public_row[at] : Bits<D>::kMasked;
      }
#pragma unroll
      for (int k = 0; k < kTake; ++k) {
        const float z = float_of<D>(token[k].z), z0 = float_of<D>(token[k].z0);
        // NaN if both rows mask the token, which then does not matter.
        const float score = vfma(z, by_private, by_public * z0);
        bool matters = score >= least.score;
        draft.exceeds = draft.exceeds || score > at_target;
        if (least.rough) matters = matters && matters_in_double(reverse, z, z0);
        draft.uncovers = draft.uncovers || (z0 == -HUGE_VALF && z > -HUGE_VALF);
        draft.wild = draft.wild || (matters && z0 < least_logit);
        const unsigned all = __ballot_sync(kAllLanes, matters);
        const int at = draft.count + __popc(all & ((1u << lane_id()) - 1u));
        if (matters && at < draft.room) draft.tokens[at] = token[k];
        if (draft.count <= draft.room) draft.count += __popc(all);  // no row can overflow it
      }
    }
  }

  __device__ double power(bool reverse) const { return reverse ? 1.0 - order : order; }

  __device__ bool matters_in_double(bool reverse, double z, double z0) const {
    const double log_q = z0 - pair.public_lse, gain = power(reverse) * (z - z0 - pair.shift);
    // Half a nat, so rather too many tokens matter; and the rounding of logits far from 0.
    const double slack = 0.5 + 1e-15 * (std::fabs(log_q) + std::fabs(gain));
    return log_q + gain > threshold - slack;
  }
};

// All tokens of the row.
template <Dtype D>
struct SourceTokens {
  static constexpr bool kWild = true;

  const ListSource<D>* source;

  __device__ static constexpr bool empty() { return false; }
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    source->pair.for_each(visit);
  }
};

// The tokens on the list of this warp. A list that does not fit its memory is made anew, piece by
// piece, for each evaluation.
template <Dtype D>
struct ListTokens {
  static constexpr bool kWild = false;
  // The tokens of a stretch that are looked at together, and the least memory of a piece.
  static constexpr int kTake = 4, kPiece = kTake * kWarp;

  const ListSource<D>* source;
  ListedToken<D>* memory;  // of this warp
  bool reverse;

  __device__ const typename ListSource<D>::Kept& kept() const { return source->kept[warp_id()]; }
  __device__ bool empty() const { return kept().none; }
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    constexpr int kPieces = kStretch / kPiece;
    const RowPair<D>& pair = source->pair;
    const int pieces = kept().fit ? 0 : source->stretches * kPieces;
    int next = warp_id(), listed = kept().count;
    do {
      if (pieces > 0) {
        ListDraft<D> draft{memory, kListCapacity<D>};
        for (; next < pieces && draft.count + kPiece <= draft.room; next += kListWarps) {
          const int stretch = next / kPieces;
          const unsigned steps = ((1u << kTake) - 1u) << (next % kPieces * kTake);
          source->template look<kTake>(reverse, stretch, steps, true,
                                       source->least_score(reverse, stretch), draft);
        }
        listed = draft.count;
        __syncwarp();
      }
      for (int k = lane_id(); k < listed; k += kWarp) {
        const ListedToken<D> token = memory[k];
        const double z = float_of<D>(token.z), z0 = float_of<D>(token.z0);
        visit(z0 - pair.public_lse, z - z0 - pair.shift);
      }
      __syncwarp();  // the next piece goes to the same memory
    } while (next < pieces);
  }
};

template <Dtype D>
class BlockLists {
 public:
  using Row = BlockRow<ListTokens<D>, true>;

  // scores: those of the row. memory: shared memory of this warp, for kListCapacity<D> tokens.
  __device__ BlockLists(ListSource<D>& source, const std::uint32_t* scores, ListedToken<D>* memory)
      : source_(source), scores_(scores), memory_(memory) {}

  // Makes the list of F or G. Returns false if a wild token matters.
  __device__ bool list(bool reverse, double unlisted) {
    source_.set_threshold(list_threshold(source_.log_target, unlisted, source_.pair.vocab));
    if (!list_tokens(reverse)) return false;
    if (!reverse) row_.survey(source_.log_target);
    return true;
  }

  // Whether the public row masks a token that the private row has; known from the list of F.
  __device__ bool uncovers() const { return uncovers_; }

  __device__ const Row& row() const { return row_; }

  // Whether one token of the list of G alone exceeds the target at lambda = 1, more or less.
  __device__ bool exceeds() const { return exceeds_; }

 private:
  static constexpr int kWordsAtOnce = 16;  // loads that are on their way together
  static constexpr int kTake = 8;
  static constexpr int kManyGroups = 16;  // with more than these, all of a stretch is looked at

  // Each warp lists tokens of its own stretches, in the row's order: the same on every run.
  __device__ bool list_tokens(bool reverse) {
    ListDraft<D> draft{memory_, kListCapacity<D>};
    const int items = source_.stretches;
    for (int first = warp_id(); first < items; first += kWordsAtOnce * kListWarps) {
      const int mine = first + lane_id() * kListWarps;
      typename ListSource<D>::Least least{HUGE_VALF, false};
      if (mine < items) least = source_.least_score(reverse, mine);
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
        const float bound = __shfl_sync(kAllLanes, least.score, k);
        const unsigned found = __ballot_sync(kAllLanes, score[k] >= bound);
        if (lane_id() == k) hits = found;
      }
      const unsigned rough = __ballot_sync(kAllLanes, least.rough);
      unsigned hit = __ballot_sync(kAllLanes, hits != 0);
      for (; hit != 0; hit &= hit - 1) {
        const int k = __ffs(static_cast<int>(hit)) - 1;
        const unsigned groups = __shfl_sync(kAllLanes, hits, k);
        const float bound = __shfl_sync(kAllLanes, least.score, k);
        const bool many = __popc(groups) > kManyGroups;
        source_.template look<kTake>(reverse, first + k * kListWarps, many ? kAllLanes : groups,
                                     many, {bound, (rough >> k & 1u) != 0}, draft);
      }
    }
    const bool none = __syncthreads_or(draft.uncovers || draft.count > 0) == 0;
    bool fits = true;
    exceeds_ = false;
    if (!none) {
      if (reverse) exceeds_ = __syncthreads_or(draft.exceeds) != 0;
      const bool too_many = draft.count > draft.room;
      if (__syncthreads_or(draft.uncovers || draft.wild || too_many)) {
        uncovers_ = __syncthreads_or(draft.uncovers) != 0;
        // No further list is made after this.
        if (__syncthreads_or(draft.uncovers || draft.wild)) return false;
        fits = false;
      }
    }
    if (lane_id() == 0) source_.kept[warp_id()] = {draft.count, none, fits};
    __syncwarp();
    row_ = Row({&source_, memory_, reverse}, source_.order);
    return true;
  }

  ListSource<D>& source_;
  const std::uint32_t* scores_;
  ListedToken<D>* memory_;
  bool uncovers_ = false, exceeds_ = false;
  Row row_;
};

ADAPMIXED_CORE_END
