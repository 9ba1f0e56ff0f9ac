// The first read of every row: its log-sum-exp in double and, for large targets, the tokens that
// may decide (project/row_search.h), found by scores in floats.
#pragma once

#include "common/block.cuh"
#include "common/log_sum_exp.cuh"
#include "project/cuda_call.cuh"

ADAPMIXED_CORE_BEGIN

// Finds the tokens with log q + s log r above the threshold of a list, for s = order and
// s = 1 - order.
//
// In floats the score is s z + (1 - s) z0. Tokens that are not rare have |z0| <= Z = |lse_0| + 680.
// Their score S is off by at most 2 |S| + 3 order Z units (kFloatUnit): two products, their factors
// and a sum. If serves(), that is less than the half nat of slack. Above the threshold the error
// grows more slowly than S does, or S becomes infinite.
class ListScores {
 public:
  __device__ ListScores(double order, double log_target, std::int64_t vocab, double private_lse,
                        double public_lse)
      : order_(order), public_lse_(public_lse), shift_(private_lse - public_lse) {
    least_ = list_threshold(log_target, kUnlistedDelicate, vocab);
    for (int way = 0; way < 2; ++way) {
      const double s = power(way);
      const double threshold = least_ + public_lse + s * shift_;
      by_private_[way] = static_cast<float>(s);
      by_public_[way] = static_cast<float>(1.0 - s);
      threshold_[way] = static_cast<float>(threshold - kSlack);
      const double largest = std::fabs(public_lse) - kWildLogQ;
      serves_ =
          serves_ && 4.0 * kFloatUnit * (std::fabs(threshold) + order * largest) < 0.8 * kSlack;
    }
    rare_ = static_cast<float>(public_lse + kWildLogQ + 1.0);
  }

  __device__ bool serves() const { return serves_; }
  // Returns whether a token must be examined in double; masked tokens must.
  __device__ bool rare(float z0) const { return z0 < rare_; }
  __device__ bool matters(int way, float z, float z0) const {
    return vfma(z, by_private_[way], z0 * by_public_[way]) > threshold_[way];
  }
  __device__ bool rare_matters(int way, double z, double z0) const {
    const double log_q = z0 - public_lse_, gain = power(way) * (z - z0 - shift_);
    const double slack = kSlack + 1e-15 * (std::fabs(log_q) + std::fabs(gain));
    return log_q + gain > least_ - slack;
  }

 private:
  static constexpr double kSlack = 0.5;
  __device__ double power(int way) const { return way == 0 ? order_ : 1.0 - order_; }

  double order_, public_lse_, shift_, least_;
  float by_private_[2], by_public_[2], threshold_[2], rare_;
  bool serves_ = true;
};

// Whether the private row has a token that the public row masks; whether a token too rare for
// floats may be needed on each list.
struct RareFindings {
  bool uncovered = false, wanted[2] = {false, false};
};

// Puts the tokens that matter on the warp's two lists, in order. private_row: where this thread
// reads its packs. A whole block must call this together.
template <Dtype D>
__device__ RareFindings list_tokens(const typename Bits<D>::type* private_row, bool private_aligned,
                                    const typename Bits<D>::type* public_row, int vocab,
                                    const ListScores& scores, RowLists& lists) {
  const bool public_aligned = pack_aligned<D>(public_row);
  const int warp = warp_id(), lane = lane_id();
  const unsigned before = (1u << lane) - 1u;
  RareFindings rare;
  int count[2] = {0, 0};
  const int stride = static_cast<int>(blockDim.x) * kPack;
  for (int first = warp * kWarp * kPack; first < vocab; first += stride) {
    const int v = first + lane * kPack;
    const Pack<D> pack = load_pack<D>(private_row, v, vocab, private_aligned);
    const Pack<D> public_pack = load_pack<D>(public_row, v, vocab, public_aligned);
    bool on[2][kPack], any = false;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float z = float_of<D>(pack.bits[k]), z0 = float_of<D>(public_pack.bits[k]);
      const bool is_rare = scores.rare(z0);
#pragma unroll
      for (int way = 0; way < 2; ++way) {
        on[way][k] = scores.matters(way, z, z0) && !is_rare;
        any = any || on[way][k];
      }
      if (is_rare && z0 == -HUGE_VALF) {
        rare.uncovered = rare.uncovered || z > -HUGE_VALF;
      } else if (is_rare) {
        for (int way = 0; way < 2; ++way) {
          rare.wanted[way] = rare.wanted[way] || scores.rare_matters(way, z, z0);
        }
      }
    }
    if (!__any_sync(kAllLanes, any)) continue;
#pragma unroll
    for (int way = 0; way < 2; ++way) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const unsigned hits = __ballot_sync(kAllLanes, on[way][k]);
        const int at = count[way] + __popc(hits & before);
        if (on[way][k] && at < kSegment) {
          lists.tokens[way][warp][at] = v + k;
        }
        count[way] += __popc(hits);
      }
    }
  }
  for (int way = 0; way < 2; ++way) {
    if (lane == 0) lists.count[way][warp] = count[way];
    // Short rows have fewer warps; the counts of the missing warps are 0.
    const int absent = static_cast<int>(threadIdx.x);
    if (absent >= warp_count() && absent < kScanWarps) lists.count[way][absent] = 0;
  }
  return rare;
}

template <Dtype D, bool kLists>
__global__ void __launch_bounds__(kScanThreads, 2)
    project_scan_kernel(const __grid_constant__ ProjectCall call) {
  using Word = typename Bits<D>::type;
  const RowAt at = row_at(call);
  const int vocab = static_cast<int>(call.in.shape.vocab);  // at most 2^30
  const Word* row = row_bits<D>(call.in.private_logits, at.model, at.position);
  const double public_lse = call.in.public_lse[at.position];
  auto* kept = dynamic_shared<Pack<D>>();
  const double lse = row_sum_near<D>(row, vocab, public_lse, [&](int v, const Pack<D>& pack) {
    if (kLists && call.kept) kept[v / kPack] = pack;
  });
  // NaN: the row has a status, or its lse is far off. The kernel in double takes it.
  bool found = !std::isnan(lse), done = false;
  if (kLists && found) {
    const double log_target = (call.order - 1.0) * call.radius;
    const ListScores scores(call.order, log_target, vocab, lse, public_lse);
    RowLists& lists = call.lists[at.row];
    const RareFindings rare =
        list_tokens<D>(call.kept ? kept[0].bits : row, call.kept || pack_aligned<D>(row),
                       row_bits<D>(call.in.public_logits, 0, at.position), vocab, scores, lists);
    const bool uncovers = rare.uncovered, wants = rare.wanted[0], wants_back = rare.wanted[1];
    done = __syncthreads_or(uncovers) != 0;
    found = scores.serves() && !__syncthreads_or(wants) && !done;
    if (__syncthreads_or(wants_back) && threadIdx.x == 0) lists.count[1][0] = kSegment + 1;
  }
  if (threadIdx.x != 0) return;
  call.found[at.row] = found;
  call.done[at.row] = 0;
  if (!found && !done) return;
  call.out.private_lse[at.at] = lse;
  call.out.status[at.at] = kRowOk;
  if (done) set_weight(call, at, {0.0, 1.0});
}

ADAPMIXED_CORE_END
