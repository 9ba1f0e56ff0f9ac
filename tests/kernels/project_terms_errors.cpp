// Prints the largest errors of project/terms.h, as shares of what SumAt::error allows for, over x
// of both signs at many orders: of careful terms, of chains (for x raised by kWeightError), of
// powers.
#include <algorithm>
#include <cstdio>

#include "common/several.h"
#include "project/terms.h"

using namespace adapmixed::ADAPMIXED_ISA;

template <Terms kTerms>
static double term(double s, double order, float x) {
  Tokens<Flt> t;
  t.mass = Flt(1.0f), t.x = Flt(x), t.X = vmax(t.x + Flt(1.0f), Flt(1e-30f));
  t.u = t.x * reciprocal(t.X), t.log2 = float_log2(t.X), t.log = float_log(t.x, t.X);
  Side<kTerms, Flt> side(s, static_cast<int>(order));
  side.add(t), side.widen();
  return sum(side.value.total) / Flt::kLanes;
}

// (1 + x)^s - 1 - s x, or (1 + x)^s.
static long double exact(double s, long double x, bool power) {
  const long double u = s * std::log1p(x);
  if (power) return std::exp(u);
  if (std::fabs(x) > 1e-2L || std::fabs(s * x) > 1e-2L) return std::expm1(u) - s * x;
  long double part = s * (s - 1.0) / 2.0 * x * x, total = part;
  for (int k = 3; k < 14; ++k) total += part *= (s - k + 1) / k * x;
  return total;
}

template <Terms kTerms>
static double share(double s, double order, float x) {
  if (kTerms == Terms::kChain && order != std::floor(order)) return 0.0;
  const RowRange range{0.0, 0.0, 0.0};
  const ProjectTarget target(order, 0.0);
  const double found = term<kTerms>(s, order, x), reach = std::fabs(std::log1p(x));
  const long double before = kTerms == Terms::kChain ? x / (1.0L + kWeightError) : x;
  const double truth = exact(s, before, powers(kTerms));
  const double sums[3] = {truth, 0.0, 0.0};
  // Of a power's 24 units, q and the additions have 19, and are exact here.
  const double most = powers(kTerms)
                          ? (5.0 + std::fabs(s) * (2.0 + 6.0 * reach)) * kFloatUnit * truth
                          : sum_at<kTerms>(sums, s, reach, range, target).error;
  return (powers(kTerms) ? std::fabs(truth - found) : truth - found) / most;
}

int main() {
  double worst[3] = {};
  for (const double order : {1.001, 1.01, 1.5, 2.0, 2.5, 3.0, 8.0, 17.5, 64.0, 256.0, 1000.5}) {
    for (const double s : {order, 1.0 - order}) {
      for (int k = 0; k < 200000; ++k) {
        const float size = static_cast<float>(std::pow(10.0, -7.0 + k % 100000 * 1e-4));
        const float x = k < 100000 ? size : -size;
        if (x < -0.999996f || std::fabs(s * std::log1p(static_cast<double>(x))) > 60.0) continue;
        worst[0] = std::max(worst[0], share<Terms::kCareful>(s, order, x));
        worst[1] = std::max(worst[1], share<Terms::kChain>(s, order, x));
        worst[2] = std::max(worst[2], share<Terms::kPlain>(s, order, x));
      }
    }
  }
  std::printf("%g %g %g\n", worst[0], worst[1], worst[2]);
}
