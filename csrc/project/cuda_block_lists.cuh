// Large targets T = e^{(alpha-1) R}: only the few tokens with q r^alpha near T or above can decide.
// They are found by their scores (cuda_scores.cuh) and kept in shared memory.
#pragma once

#include "project/cuda_block_row.cuh"
#include "project/cuda_scores.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// The tokens of both lists together. A block may have this much without asking for more shared
// memory.
constexpr int kListCapacity = 2560;

struct ListTokens {
  static constexpr bool kWild = false;

  const double* log_q;
  const double* t;
  int count;

  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int k = static_cast<int>(threadIdx.x); k < count; k += static_cast<int>(blockDim.x)) {
      visit(log_q[k], t[k]);
    }
  }
};

template <Dtype D>
class BlockLists {
 public:
  using Row = BlockRow<ListTokens>;

  // log_q, t: shared memory of kListCapacity doubles each.
  __device__ BlockLists(const ScoredRow<D>& row, double log_target, double* log_q, double* t)
      : row_(row), order_(row.order), log_target_(log_target), log_q_(log_q), t_(t) {}

  // Empties the lists.
  __device__ void set_unlisted(double unlisted) {
    threshold_ = list_threshold(log_target_, unlisted, row_.pair.vocab);
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
  // Takes rather too many tokens: the slack is half a nat, plus the rounding of logits far from 0.
  __device__ bool matters(double log_q, double t, double s) const {
    const double gain = s * t;
    const double slack = 0.5 + 1e-15 * (std::fabs(log_q) + std::fabs(gain));
    return log_q + gain > threshold_ - slack;
  }

  // Lists tokens by thread, and in the row's order within a thread: the same on every run.
  __device__ bool list(bool reverse, Row& out) {
    const double s = reverse ? 1.0 - order_ : order_;
    int count = 0;
    bool uncovers = false;
    row_.for_each(reverse, threshold_, [&](double log_q, double t) {
      uncovers = uncovers || t == HUGE_VAL;
      if (!matters(log_q, t, s)) return;
      // A thread with too many tokens stops counting, so that no row can overflow the sum.
      count = log_q >= kWildLogQ && count <= kListCapacity ? count + 1 : kListCapacity + 1;
    });
    uncovers_ = __syncthreads_or(uncovers) != 0 || uncovers_;
    const Prefix<int> share = block_prefix(count);
    if (uncovers_ || share.total > kListCapacity - used_)
      return false;  // no further list is made after this
    int at = used_ + share.before;
    row_.for_each(reverse, threshold_, [&](double log_q, double t) {
      if (!matters(log_q, t, s)) return;
      log_q_[at] = log_q;
      t_[at++] = t;
    });
    __syncthreads();
    out = Row({log_q_ + used_, t_ + used_, share.total}, order_);
    used_ += share.total;
    return true;
  }

  const ScoredRow<D>& row_;
  double order_, log_target_, threshold_ = 0.0;
  double *log_q_, *t_;
  int used_ = 0;
  bool uncovers_ = false;
  Row forward_, reverse_;
};

ADAPMIXED_CORE_END
