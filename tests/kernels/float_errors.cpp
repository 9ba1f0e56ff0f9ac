// Prints the largest errors of one header; its argument names it.
//
// terms: of project/terms.h, as shares of what SumAt::error allows for, over x of both signs at
// many orders: of careful terms, of chains (for x raised by one of their 4 units), of powers.
// ratio: of common/float_ratio.h,
// - of 2^n 2^{f/m} - 1 given f, in kFloatUnit, over every float f in range and the worst n;
// - of r - 1 as a whole, over random logits, relative to the allowed error;
// - of q in kFloatUnit, and of a token's two parts relative to 2^-37.
// losses: of leave_one_out/formula.h, as shares of what LossBound allows for,
// - of x against the public distribution, where one model alone differs from it; and of x near 0
//   while the others differ;
// - of a listed term whose x, or X, has moved; of power_excess; and of an excess's slope.
// divergences: of renyi/formula.h,
// - of r t - d and d - t = h(t) given t, in kFloatUnit;
// - of a token's terms up to 10 and of larger ones, as shares of what divergence_above allows for.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "common/float_ratio.h"
#include "common/simd_float.h"
#include "leave_one_out/formula.h"
#include "project/terms.h"
#include "renyi/formula.h"

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
        const std::uint32_t pattern = bits + k;
        float f;
        std::memcpy(&f, &pattern, sizeof f);
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

// Errors of q, in kFloatUnit, and of a token's a split in two parts, relative to 2^-37.
static std::pair<double, double> worst_of_tokens(long count) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  double worst = 0.0, worst_split = 0.0;
  for (long k = 0; k < count; ++k) {
    const double lse = (2.0 * uniform(random) - 1.0) * 688.0 * uniform(random);
    const auto z0 = static_cast<float>(lse - 62.0 * uniform(random));
    if (z0 - lse < -62.0) continue;  // floats serve the others
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
  const long double before = kTerms == Terms::kChain ? x / (1.0L + kFloatUnit) : x;
  const double truth = exact(s, before, powers(kTerms));
  const double sums[3] = {truth, 0.0, 0.0};
  double most = sum_at<kTerms>(sums, s, reach, range, target).error;
  if (powers(kTerms)) most -= 3.0 * kFloatUnit;  // of q
  // q and the additions have 19 units, and are exact here.
  if (kTerms != Terms::kCareful) most -= 19.0 * kFloatUnit * truth;
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

// A logit and its log-sum-exp, such that log r is near `log_r` for the public logit 0 and
// log-sum-exp `public_lse`.
struct Logit {
  float z;
  double lse;
  long double excess(double public_lse) const {  // r - 1
    return expm1l(static_cast<long double>(z) - (static_cast<long double>(lse) - public_lse));
  }
  float computed(double public_lse, double weight) const {  // weight (r - 1), as in cpu_tile.h
    const FloatShift shift = make_shift(lse, public_lse);
    const FloatToken token = split_token(0.0f);
    const float raw = ratio_excess(z, token.grid + shift.c, token.rest);
    return vfma(raw, static_cast<float>(weight * (1.0 + shift.residual)),
                static_cast<float>(weight * shift.residual));
  }
};

// The largest error of x of the first of N models, as a share of what is allowed, and that as a
// share of what is allowed where x is listed; the others are `size` times as far from q, half of
// them above and half below.
static std::pair<double, double> worst_neighbour(bool zero_out, double first, double size) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  constexpr int kModels = 16;
  const double order = 2.0, weight = 0.7;
  const adapmixed::LeaveOneOutOptions options{&order, 1, zero_out, kModels};
  const Neighbours all({kModels, 1, 1}, false, options);
  const FloatErrors errors(all, weight, weight, 0.0);
  double worst = 0.0, listed = 0.0;
  for (int k = 0; k < 300000; ++k) {
    const double public_lse = 3.0 + 5.0 * uniform(random), far = uniform(random);
    const auto logit = [&](double log_r) {
      const double lse = 3.0 + 5.0 * uniform(random);
      return Logit{static_cast<float>(log_r + lse - public_lse), lse};
    };
    const Logit above = logit(size * far), below = logit(std::log1p(-std::expm1(size * far)));
    const Logit left_out = logit(first * uniform(random));
    float deviations[kModels];
    double total = 0.0, largest = -1.0;
    long double exact = 0.0L, sizes = 0.0L;
    for (int i = 0; i < kModels; ++i) {
      const Logit& of = i == 0 ? left_out : i % 2 == 1 ? above : below;
      deviations[i] = of.computed(public_lse, weight);
      largest = std::fmax(largest, deviations[i]);
      exact += weight * of.excess(public_lse), sizes += fabsl(weight * of.excess(public_lse));
    }
    for (int i = 0; i < kModels; i += 8) {
      float partial = 0.0f;
      for (int j = i; j < i + 8; j += 4) {
        partial += (deviations[j] + deviations[j + 1]) + (deviations[j + 2] + deviations[j + 3]);
      }
      total += partial;
    }
    const auto of = float_mixture(all, 0.1, total, largest, weight);
    if (of.fails) continue;
    const auto scaled = static_cast<float>(of.middle * of.factor);
    const float found = vfma(-deviations[0], static_cast<float>(of.factor), scaled);
    const long double mean = exact / kModels, factor = 1.0L / (all.divisor * (1.0L + mean));
    const long double middle = zero_out ? 0.0L : mean, delta = weight * left_out.excess(public_lse);
    const long double x = (middle - delta) * factor, spread = sizes / kModels;
    const double allowed =
        (kOwn * fabsl(x) + kMean * spread / (1.0L + mean) * fabsl(x) +
         (zero_out ? 0.0L : 9.6L * fabsl(middle) * factor + kMean * spread * factor)) *
            kFloatUnit +
        2.0 * kRatioAbsolute * (fabsl(delta) + weight) * factor;
    worst = std::max(worst, static_cast<double>(fabsl(found - x)) / allowed);
    const auto size = static_cast<double>(fabsl(x));
    listed = std::max(listed, allowed / (size * errors.of(size, of.shared, of.factor)));
  }
  return {worst, listed};
}

// The largest |c'(x)| up to a reach, as a share of its bound order (order - 1) |x| + bend t^2.
static double worst_slope(double s, const MomentChoice& at) {
  const double bend = fit_excess(s, at.reach, at.degree).bend;
  double worst = 0.0;
  for (int k = -100; k <= 100; ++k) {
    const double t = k / 100.0, x = at.reach * t;
    const double slope = std::fabs(s * std::expm1((s - 1.0) * std::log1p(x)));
    if (k != 0) worst = std::fmax(worst, slope / (s * (s - 1.0) * std::fabs(x) + bend * t * t));
  }
  return worst;
}

static void print_of_losses() {
  double moved = 0.0, powered = 0.0, slope_share = 0.0;
  for (const double order : {1.001, 1.01, 1.5, 2.0, 2.5, 8.0, 17.5, 64.0, 256.0, 1000.5}) {
    for (const double s : {order, 1.0 - order}) {
      const MomentChoice at = moments_at(kDegrees - 1, order);
      slope_share = std::fmax(slope_share, worst_slope(s, at));
      for (int k = 0; k < 40000; ++k) {
        const double size = std::pow(10.0, -7.0 + k % 20000 * 5e-4);
        const double x = k < 20000 ? size : -size, X = 1.0 + x;
        const double log = std::log1p(x), reach = std::fabs(s * log);
        if (x < -0.999996 || reach > 60.0) continue;
        const long double c = exact(s, x, false);
        ListedSums sums;
        sums.add({1.0, std::fabs(log), 0.0, 0.0}, s, true);
        // s (X^{s-1} - 1), the excess's derivative, times what moves.
        const long double slope = s * expm1l((s - 1.0L) * log1pl(x)) * (X < 0.5 ? X : x);
        moved = std::max(moved, static_cast<double>(fabsl(slope / c)) / sums.weight);
        const auto rounded = static_cast<float>(x);
        const long double truth = exact(s, rounded, false);
        const float found =
            power_excess(rounded, float_log(rounded, rounded + 1.0f), static_cast<float>(s));
        powered = std::max(powered,
                           static_cast<double>(fabsl(found / truth - 1.0L)) / (sums.value - 1.0));
      }
    }
  }
  const auto [far, far_listed] = worst_neighbour(true, 3.0, 1e-4);
  const auto [common, common_listed] = worst_neighbour(false, 1e-6, 0.6);
  std::printf("%g %g %g %g %g %g %.12g\n", far, far_listed, common, common_listed, moved, powered,
              slope_share);
}

// The largest errors of a token's terms up to 10 and of larger ones, as shares of what
// divergence_above allows for.
static std::pair<double, double> worst_divergences() {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  double worst[2] = {};
  for (int k = 0; k < 2000000; ++k) {
    const double order = 1.0 + std::exp(6.9 * uniform(random) - 3.0);
    const PairShift shift(100.0 * uniform(random), 100.0 * uniform(random));
    const auto z = static_cast<float>(shift.p_lse - 59.9 * uniform(random));
    const auto z0 = static_cast<float>(shift.q_lse - 59.9 * uniform(random));
    PairSums<float, 1> sums(shift, &order, 0, 1);
    if (!sums.add(z, z0)) continue;
    sums.widen();
    double found[PairSums<float, 1>::kSize];
    sums.get(found);
    const long double log_p = static_cast<long double>(z) - shift.p_lse, eta = order - 1.0L;
    const long double log_q = static_cast<long double>(z0) - shift.q_lse, t = log_p - log_q;
    const long double p = expl(log_p), q = expl(log_q), u = eta * t;
    if (fabsl(t) < 1e-2L || fabsl(u) < 1e-2L || fabsl(u) > 300.0L) continue;
    const long double truth[] = {p * t - (p - q), p - q - q * t, p * (expm1l(u) - u),
                                 q * (expm1l(-u) + u)};
    for (int j = 0; j < 4; ++j) {
      const double allowed =
          (kUnits + 5.0 * std::log1p(static_cast<double>(truth[j]))) * kFloatUnit;
      const double error = static_cast<double>(fabsl(found[1 + j] - truth[j]) - 1e-36L);
      double& of = worst[truth[j] > 10.0L];
      of = std::max(of, error / (allowed * static_cast<double>(truth[j])));
    }
  }
  return {worst[0], worst[1]};
}

static void print_of_divergences() {
  double entropy = 0.0;
  for (int k = 0; k < 4000000; ++k) {
    const auto size = static_cast<float>(std::exp(-16.0 + k % 2000000 * 1e-5));
    const float t = k < 2000000 ? size : -size;
    if (size > kFloatLog) continue;
    const long double d = expm1l(t), r = 1.0L + d;
    // By series where the parts cancel.
    const bool small = size < 1e-2f;
    long double forward = r * t - d, backward = d - t, power = 0.5L * t * t;
    if (small) forward = backward = 0.0L;
    for (int j = 2; small && j < 12; power *= t / ++j) {
      backward += power, forward += power * (j - 1);
    }
    const EntropyTerms<float> terms = entropy_terms(t);
    entropy = std::max({entropy, static_cast<double>(fabsl(terms.forward / forward - 1.0L)),
                        static_cast<double>(fabsl(terms.backward / backward - 1.0L))});
  }
  const auto [small, large] = worst_divergences();
  std::printf("%g %g %g\n", entropy / kFloatUnit, small, large);
}

int main(int, char** arguments) {
  if (std::strcmp(arguments[1], "terms") == 0) return print_of_terms(), 0;
  if (std::strcmp(arguments[1], "losses") == 0) return print_of_losses(), 0;
  if (std::strcmp(arguments[1], "divergences") == 0) return print_of_divergences(), 0;
  const auto [of_q, of_split] = worst_of_tokens(10000000);
  std::printf("%.4f %.4f %.4f %.4f %.4f %.4f\n", worst_given_f(0), worst_given_f(1),
              worst_given_f(2), worst_of_all(20000000), of_q, of_split);
}
