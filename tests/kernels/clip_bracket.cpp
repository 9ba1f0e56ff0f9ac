// Prints how ClipBracket (csrc/clip/cpu_sums.h) differs from sums over all tokens.
#include <cstdio>
#include <random>
#include <vector>

#include "clip/cpu_public.h"
#include "common/parallel.h"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr std::int64_t kTokens = 20000;
constexpr ClipBox kBox{0.6, 1.65};

struct Tokens {
  std::vector<double> e, q;
};

// `at_bound`: share of tokens raised by e^height, which reach the upper bound just where S is 1.
Tokens make(double noise, double at_bound, double height) {
  std::mt19937_64 generator(1);
  std::normal_distribution<double> normal;
  Tokens tokens{std::vector<double>(kTokens), std::vector<double>(kTokens)};
  double of_q = 0.0, of_e = 0.0;
  for (std::int64_t v = 0; v < kTokens; ++v) {
    const double spread = height > 0.0 ? 0.0 : 2.0;
    of_q += tokens.q[v] = std::exp(spread * normal(generator));
    const double shift = v < at_bound * kTokens ? height : 0.0;
    of_e += tokens.e[v] = tokens.q[v] * std::exp(noise * normal(generator) + shift);
  }
  for (double& q : tokens.q) q /= of_q;
  for (double& e : tokens.e) e /= of_e;
  return tokens;
}

double solve(const Tokens& tokens) {
  double log_s = 0.0;
  const auto sums = [&](double at) {
    return clip_sums(Kept{tokens.e.data()}, tokens.q.data(), kTokens, kBox, std::exp(at));
  };
  return solve_clip_scale(sums, kBox.lower, 300.0, &log_s) ? std::exp(log_s) : NAN;
}

void print(const char* name, const Tokens& tokens, double low, double high) {
  const double s = solve(tokens);
  std::vector<double> memory(ClipBracket::scratch_size(kTokens));
  ClipBracket bracket(tokens.e.data(), tokens.q.data(), kTokens, 0.0, kBox, memory.data());
  const bool first = bracket.narrow(low * s, high * s);
  const double estimate = bracket.estimate() / s - 1.0, width = (high - low) * (high - low);
  // If the second narrowing is rejected, the first must still be usable.
  const bool second = first && bracket.narrow(s * (1.0 - width), s * (1.0 + width));
  const bool third = first && bracket.narrow(s * (1.0 + width / 4), s * (1.0 + width / 2));
  double worst = 0.0, moving = 0.0;
  for (int k = 0; first && k <= 10; ++k) {
    const double at = s * (1.0 + (second ? width : 0.4 * (high - low)) * (k / 5.0 - 1.0));
    const ClipSums whole = clip_sums(Kept{tokens.e.data()}, tokens.q.data(), kTokens, kBox, at);
    const ClipSums near = bracket(at);
    worst = std::fmax(worst, std::fabs(near.total - whole.total));
    moving = std::fmax(moving, std::fabs(near.moving / whole.moving - 1.0));
  }
  std::printf("%s %d %d %d %.3e %.3e %.3e\n", name, first, second, third, estimate, worst, moving);
}

void run() {
  const Tokens ordinary = make(0.7, 0.0, 0.0);
  print("around", ordinary, 0.99, 1.01);
  print("above", ordinary, 1.001, 1.02);
  print("below", ordinary, 0.98, 0.999);
  print("wide", ordinary, 0.7, 1.3);
  print("at_bound", make(0.0, 0.3, std::log(1.65 / ((1.0 - 0.3 * 1.65) / 0.7))), 0.999, 1.001);
}

}  // namespace
ADAPMIXED_CORE_END

int main() { adapmixed::ADAPMIXED_ISA::run(); }
