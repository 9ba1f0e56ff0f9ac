// The interpolants of the single-precision kernels, which depend on the orders alone. The host
// computes them once; they reach the kernel as its arguments, which may have 32 KB.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "leave_one_out/cuda_call.cuh"
#include "leave_one_out/fit.h"

ADAPMIXED_CORE_BEGIN

// One direction of one order at all degrees. The coefficients follow each other.
struct PackedFit {
  static constexpr int kCoefficients = 4 + 6 + 10 + kMaxMoments;
  ADAPMIXED_HD static int begin(int index) {
    return index == 0 ? 0 : index == 1 ? 4 : index == 2 ? 10 : 20;
  }

  double excess[kCoefficients], excess_error[kDegrees];
  float squared_slope[kCoefficients], squared_slope_error[kDegrees];

  void set(double s, double largest_order) {
    for (int index = 0; index < kDegrees; ++index) {
      const int degree = degree_at(index);
      const ExcessFit fit = fit_excess(s, moment_reach(largest_order, degree), degree);
      double size = 0.0;
      for (int k = 0; k < degree; ++k) {
        excess[begin(index) + k] = fit.excess.coefficients[k];
        squared_slope[begin(index) + k] = static_cast<float>(fit.squared_slope.coefficients[k]);
        size += std::fabs(fit.squared_slope.coefficients[k]);
      }
      excess_error[index] = fit.excess.error;
      // Each coefficient is rounded by at most 2^-24 of itself, and |t| <= 1. This number is
      // rounded, too.
      squared_slope_error[index] =
          static_cast<float>((fit.squared_slope.error + 0x1p-23 * size) * (1.0 + 0x1p-22));
    }
  }

  __device__ ExcessFitView<float> at(int index) const {
    return {{excess + begin(index), excess_error[index]},
            {squared_slope + begin(index), squared_slope_error[index]}};
  }
};

// Of the first `kOrders` orders.
template <int kOrders>
struct PackedFits {
  PackedFit forward[kOrders], reverse[kOrders];
};
constexpr int kFewOrders = 2;  // their interpolants fit 4 KB of arguments with everything else

// Returns the interpolants of these orders, which are kept for later calls.
inline std::shared_ptr<const PackedFits<kMaxOrders>> fits_of(const LossOrders& orders,
                                                             double largest_order) {
  static std::mutex mutex;
  static std::map<std::vector<double>, std::shared_ptr<const PackedFits<kMaxOrders>>> known;
  constexpr std::size_t kMostKnown = 64;
  const std::vector<double> key(orders.value, orders.value + orders.count);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = known[key];
  if (found == nullptr) {
    auto made = std::make_shared<PackedFits<kMaxOrders>>();
    for (int k = 0; k < orders.count; ++k) {
      made->forward[k].set(orders.value[k], largest_order);
      made->reverse[k].set(1.0 - orders.value[k], largest_order);
    }
    if (known.size() > kMostKnown) known.clear();
    return known[key] = std::move(made);
  }
  return found;
}

template <int kOrders>
PackedFits<kOrders> first_of(const PackedFits<kMaxOrders>& fits) {
  PackedFits<kOrders> some;
  for (int k = 0; k < kOrders; ++k) {
    some.forward[k] = fits.forward[k];
    some.reverse[k] = fits.reverse[k];
  }
  return some;
}

ADAPMIXED_CORE_END
