// Large targets T = e^{(alpha-1) R}: only tokens with q r^alpha near T or above can decide, and
// they are few. They are found without an exponential, and kept in shared memory.
#pragma once

#include "common/row_pair.cuh"
#include "project/cuda_block_row.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// Tokens of both lists together: what a block may have without asking for more shared memory.
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
  __device__ BlockLists(const RowPair<D>& pair, double order, double log_target, double* log_q,
                        double* t)
      : pair_(pair), order_(order), log_target_(log_target), log_q_(log_q), t_(t) {}

  // Forgets the lists there are.
  __device__ void set_unlisted(double unlisted) {
    threshold_ = list_threshold(log_target_, unlisted, pair_.vocab);
    used_ = 0;
  }

  // False: too many tokens matter, or a wild one does.
  __device__ bool list_forward() {
    if (!list(order_, forward_)) return false;
    forward_.survey(log_target_);
    return true;
  }
  __device__ bool list_reverse() { return list(1.0 - order_, reverse_); }

  __device__ const Row& forward() const { return forward_; }
  __device__ const Row& reverse() const { return reverse_; }

 private:
  // More is taken rather than less: half a nat, and what rounding leaves of logits far from 0.
  __device__ bool matters(double log_q, double t, double s) const {
    const double gain = s * t;
    const double slack = 0.5 + 1e-15 * (std::fabs(log_q) + std::fabs(gain));
    return log_q + gain > threshold_ - slack;
  }

  // In the order of the threads, and of the row within one: the same on every run.
  __device__ bool list(double s, Row& out) {
    int count = 0;
    pair_.for_each([&](double log_q, double t) {
      if (!matters(log_q, t, s)) return;
      // Not to overflow in any row: a thread with too many stays so.
      count = log_q >= kWildLogQ && count <= kListCapacity ? count + 1 : kListCapacity + 1;
    });
    const Prefix<int> share = block_prefix(count);
    if (share.total > kListCapacity - used_) return false;  // after which no list is made
    int at = used_ + share.before;
    pair_.for_each([&](double log_q, double t) {
      if (!matters(log_q, t, s)) return;
      log_q_[at] = log_q;
      t_[at++] = t;
    });
    __syncthreads();
    out = Row({log_q_ + used_, t_ + used_, share.total}, order_);
    used_ += share.total;
    return true;
  }

  const RowPair<D>& pair_;
  double order_, log_target_, threshold_ = 0.0;
  double *log_q_, *t_;
  int used_ = 0;
  Row forward_, reverse_;
};

ADAPMIXED_CORE_END
