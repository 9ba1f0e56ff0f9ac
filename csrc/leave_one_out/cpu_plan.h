// The orders, interpolants and sizes that all positions of one leave-one-out call share.
#pragma once

#include "common/rows.h"
#include "leave_one_out/fit.h"

ADAPMIXED_CORE_BEGIN

// The interpolants of all orders, at one degree.
struct LossFit {
  int degree = 0;
  double reach = 0.0;
  ExcessFit forward[kMaxOrders], reverse[kMaxOrders];
};

struct LossPlan : Neighbours {
  const LeaveOneOutOptions& options;
  std::int64_t models, vocab;
  int integers[kMaxOrders];  // the orders, 0 for one that is not an integer

  LossPlan(const Shape& shape, const LeaveOneOutOptions& o)
      : Neighbours(neighbours_of(shape, o)), options(o), models(shape.models), vocab(shape.vocab) {
    for (std::int64_t k = 0; k < o.num_orders; ++k) integers[k] = integer_order(o.orders[k]);
  }

  void fit_all(int degree, LossFit& fit) const {
    fit.degree = degree;
    fit.reach = moment_reach(largest_order, degree);
    for (std::int64_t k = 0; k < options.num_orders; ++k) {
      fit.forward[k] = fit_excess(options.orders[k], fit.reach, degree);
      fit.reverse[k] = fit_excess(1.0 - options.orders[k], fit.reach, degree);
    }
  }

  // x from a model's delta and the mean delta over the slots.
  template <class T>
  T excess(T delta, T mean) const {
    if (against_public) return (T(0.0) - delta) / (T(slots) * (T(1.0) + mean));
    return (mean - delta) / (T(slots - 1.0) * (T(1.0) + mean));
  }

  // The number of tokens in a chunk, which is the unit of work; the chunks' sums are added in
  // order.
  std::int64_t chunk() const {
    const std::int64_t share = round_up((vocab + 31) / 32, 64);
    return share < 512 ? 512 : share;
  }
  // The number of tokens in a tile, such that its deviations stay in the second-level cache.
  std::int64_t tile() const {
    const std::int64_t most = round_up(98304 / (models < 1 ? 1 : models), 64);
    const std::int64_t limit = most < 128 ? 128 : most > 1024 ? 1024 : most;
    const std::int64_t parts = (chunk() + limit - 1) / limit;
    return round_up((chunk() + parts - 1) / parts, 64);
  }
};

ADAPMIXED_CORE_END
