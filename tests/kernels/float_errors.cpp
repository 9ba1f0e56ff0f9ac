// Prints the largest errors of one header; its argument names it.
//
// terms: of project/terms.h, as shares of what SumAt::error allows for, over x of both signs at
// many orders: of careful terms, of chains (for x raised by kWeightError), of powers. ratio: of
// common/float_ratio.h,
// - of 2^n 2^{f/m} - 1 given f, in kFloatUnit, over every float f in range and the worst n;
// - of r - 1 as a whole, over random logits, relative to the allowed error;
// - of q in kFloatUnit, and of a token's two parts relative to 2^-37.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "common/float_ratio.h"
#include "common/several.h"
#include "project/terms.h"

using namespace adapmixed::ADAPMIXED_ISA;

// e^x - 1 for |x| <= 0.36, within 1e-15 of itself.
static double small_expm1(double x) {
  double factorial = 1307674368000.0, sum = 1.0 / factorial;
  for (int k = 15; k >= 2; --k) sum = sum * x + 1.0 / (factorial /= k);
  return x * sum;
}

static double worst_given_f(int n) {
  const float scale = exp2_integer(static_cast<float>(n) + kFloatShifter);
  double worst[8] = {};
  std::uint32_t first, last;
  const float least = 0x1p-20f, most = 0.94f;
  std::memcpy(&first, &least, sizeof first);
  std::memcpy(&last, &most, sizeof last);
  for (const float sign : {1.0f, -1.0f}) {
    for (std::uint32_t bits = first; bits + 8 <= last; bits += 8) {
      for (std::uint32_t k = 0; k < 8; ++k) {
        const std::uint32_t own = bits + k;
        float f;
        std::memcpy(&f, &own, sizeof f);
        f *= sign;
        const double exact = small_expm1(f * (0.69314718055994530942 / kOctave));
        const double truth = scale * exact + (scale - 1.0);
        const double found = vfma(scale, octave_minus_one(f), scale - 1.0f);
        worst[k] = std::max(worst[k], std::fabs(found / truth - 1.0));
      }
    }
  }
  return *std::max_element(worst, worst + 8) / kFloatUnit;
}

static double worst_of_all(long count) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  double worst = 0.0;
  for (long k = 0; k < count; ++k) {
    // log r is from -60 to 60 and often near 0; logits and log-sum-exps are far apart.
    const double size = std::exp(-18.0 * uniform(random)) * 60.0;
    const double public_lse = (2.0 * uniform(random) - 1.0) * 1200.0 * uniform(random);
    const double difference = (2.0 * uniform(random) - 1.0) * 999.0 * uniform(random);
    const auto z0 = static_cast<float>(public_lse - 62.0 * uniform(random));
    const auto z = static_cast<float>(z0 + difference + (2.0 * uniform(random) - 1.0) * size);
    const double private_lse = public_lse + difference;
    if (z - private_lse < kFloatLogP + 0.01 || z > private_lse) continue;
    const double a = static_cast<double>(z0) * kOctavesPerNat, grid = on_grid(a);
    const FloatShift shift = make_shift(private_lse, public_lse);
    const double raw =
        ratio_excess(z, static_cast<float>(grid), static_cast<float>(a - grid), shift);
    const double found = raw * (1.0 + shift.residual) + shift.residual;
    const long double log_r = static_cast<long double>(z) - z0 - (private_lse - public_lse);
    const long double truth = expm1l(log_r);
    // Allow for doubles: the rounding of the difference of log-sum-exps is not the ratio's error.
    const double allowed = kRatioUnits * kFloatUnit * std::fabs(static_cast<double>(truth)) +
                           (kRatioAbsolute + 5e-13) * static_cast<double>(truth + 1);
    worst = std::max(worst, static_cast<double>(fabsl(found - truth)) / allowed);
  }
  return worst;
}

constexpr double kLeastLogQ = -62.0;  // floats serve these tokens

// Errors of q, in kFloatUnit, and of a token's a split in two parts, relative to 2^-37.
static std::pair<double, double> worst_of_tokens(long count) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  double worst = 0.0, worst_split = 0.0;
  for (long k = 0; k < count; ++k) {
    const double reach = 750.0 + kLeastLogQ;
    const double lse = (2.0 * uniform(random) - 1.0) * reach * uniform(random);
    const auto z0 = static_cast<float>(lse - 62.0 * uniform(random));
    if (z0 - lse < kLeastLogQ) continue;
    const FloatShift shift = make_shift(lse, 0.0);
    const double found = probability(z0, shift) * (1.0 + shift.residual);
    worst = std::max(worst, std::fabs(found / std::exp(z0 - lse) - 1.0));
    const FloatToken split = split_token(z0);
    const double a = static_cast<double>(z0) * kOctavesPerNat;
    const double lost = std::fabs(a - static_cast<double>(split.grid) - split.rest);
    worst_split = std::max(worst_split, lost / 0x1p-37);
    if (std::fmod(split.grid, kGrid) != 0.0) worst_split = HUGE_VAL;
  }
  return {worst / kFloatUnit, worst_split};
}

template <Terms kTerms>
static double term(double s, double order, float x) {
  Tokens<Flt> t{};
  t.mass = Flt(1.0f), t.x = Flt(x), t.X = vmax(t.x + Flt(1.0f), Flt(1e-30f));
  t.u = t.x * reciprocal(t.X), t.log2 = float_log2(t.X), t.log = float_log(t.x, t.X);
  const auto value = [&](auto side) {
    side.add(t), side.widen();
    return sum(side.value.total) / Flt::kLanes;
  };
  return s > 0.0 ? value(Side<kTerms, false, Flt>(order)) : value(Side<kTerms, true, Flt>(order));
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

static void print_of_terms() {
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

int main(int, char** arguments) {
  if (std::strcmp(arguments[1], "terms") == 0) return print_of_terms(), 0;
  const auto [of_q, of_split] = worst_of_tokens(10000000);
  std::printf("%.4f %.4f %.4f %.4f %.4f %.4f\n", worst_given_f(0), worst_given_f(1),
              worst_given_f(2), worst_of_all(20000000), of_q, of_split);
}
