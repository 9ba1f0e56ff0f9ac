// The degrees of the interpolants of a leave-one-out call, and the sums that they are applied to.
#pragma once

#include "core/moments.h"
#include "core/neighbour.h"

ADAPMIXED_CORE_BEGIN

constexpr int kDegrees = 4;
ADAPMIXED_HD int degree_at(int index) {
  return index == 0 ? 4 : index == 1 ? 6 : index == 2 ? 10 : kMaxMoments;
}

// The index of the degree. Few x should lie beyond the reach, where they are listed: |x| is about
// weight / slots times |r - 1|.
ADAPMIXED_HD int loss_degree(const Neighbours& all, double largest_weight) {
  const double wanted = (0.5 + 5.0 * largest_weight) / all.slots;
  int index = 0;
  while (index + 1 < kDegrees && moment_reach(all.largest_order, degree_at(index)) < wanted) {
    ++index;
  }
  return index;
}

// Excess sums over single tokens, and the larger of their slopes by log x: of those whose mean over
// the models is that of floats, and of the others.
struct ListedSums {
  double forward, reverse, rough_slope, slope;
};

// Sums of one model over a chunk, later over a position; a view.
struct ModelSums {
  ADAPMIXED_HD static std::int64_t size(int degree, std::int64_t orders) {
    return 2 + degree + 4 * orders;
  }

  double* data;
  int degree;

  ADAPMIXED_HD double& first() const { return data[0]; }          // sum p x
  ADAPMIXED_HD double& listed_second() const { return data[1]; }  // sum p x^2 beyond the reach
  ADAPMIXED_HD double* moments() const { return data + 2; }       // sum p t^{2+k}, |t| <= 1
  // The excesses beyond the reach.
  ADAPMIXED_HD ListedSums& listed(std::int64_t k) const {
    return reinterpret_cast<ListedSums*>(data + 2 + degree)[k];
  }
  // sum p x^2.
  ADAPMIXED_HD double second(double reach) const {
    return reach * reach * moments()[0] + listed_second();
  }
};

ADAPMIXED_CORE_END
