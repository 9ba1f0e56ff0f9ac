// What all positions of one leave-one-out call share: orders, interpolants, sizes.
#pragma once

#include <initializer_list>

#include "core/moments.h"
#include "core/neighbour.h"
#include "cpu/rows.h"

ADAPMIXED_CORE_BEGIN

// The interpolants of all orders at one degree.
struct LossFit {
  int degree = 0;
  double reach = 0.0;
  ExcessFit forward[kMaxOrders], reverse[kMaxOrders];
};

struct LossPlan : Neighbours {
  const LeaveOneOutOptions& options;
  std::int64_t models, vocab;
  int integers[kMaxOrders];  // the orders, 0 where one is no integer

  LossPlan(const Shape& shape, const LeaveOneOutOptions& o)
      : Neighbours(neighbours_of(shape, o)), options(o), models(shape.models), vocab(shape.vocab) {
    for (std::int64_t k = 0; k < o.num_orders; ++k) integers[k] = integer_order(o.orders[k]);
  }

  // Few x should lie beyond the reach, where they are listed: |x| is about weight / slots times
  // |r - 1|.
  int degree(double largest_weight) const {
    const double wanted = (0.5 + 5.0 * largest_weight) / slots;
    for (const int degree : {4, 6, 10}) {
      if (moment_reach(largest_order, degree) >= wanted) return degree;
    }
    return kMaxMoments;
  }

  void fit(int degree, LossFit& fit) const {
    fit.degree = degree;
    fit.reach = moment_reach(largest_order, degree);
    for (std::int64_t k = 0; k < options.num_orders; ++k) {
      fit.forward[k] = fit_excess(options.orders[k], fit.reach, degree);
      fit.reverse[k] = fit_excess(1.0 - options.orders[k], fit.reach, degree);
    }
  }

  // Tokens in a chunk: the unit of work, whose sums are added in order.
  std::int64_t chunk() const {
    const std::int64_t share = round_up((vocab + 31) / 32, 64);
    return share < 512 ? 512 : share;
  }
  // Tokens in a tile: the models' deviations on it stay in the second-level cache.
  std::int64_t tile() const {
    const std::int64_t most = round_up(98304 / (models < 1 ? 1 : models), 64);
    const std::int64_t limit = most < 128 ? 128 : most > 1024 ? 1024 : most;
    const std::int64_t parts = (chunk() + limit - 1) / limit;
    return round_up((chunk() + parts - 1) / parts, 64);
  }
};

// Excess sums over single tokens, and the larger of their slopes by log x.
struct ListedSums {
  double forward, reverse, slope;
};

// Sums of one model over a chunk, later over a position; a view.
struct ModelSums {
  static std::int64_t size(int degree, std::int64_t orders) { return 2 + degree + 3 * orders; }

  double* data;
  int degree;

  double& first() const { return data[0]; }          // sum p x
  double& listed_second() const { return data[1]; }  // sum p x^2 beyond the reach
  double* moments() const { return data + 2; }       // sum p t^{2+k}, |t| <= 1
  // The excesses beyond the reach.
  ListedSums& listed(std::int64_t k) const {
    return reinterpret_cast<ListedSums*>(data + 2 + degree)[k];
  }
};

ADAPMIXED_CORE_END
