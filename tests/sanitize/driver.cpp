// Runs every C++ entry point over the cases of dump_cases.py, for each instruction set of this
// machine and 1, 2 and 3 threads, from two callers at once, and compares the answers. Built with
// sanitizers (CMake: ADAPMIXED_SANITIZE), without Python and torch in the process.
//
// Nothing is suppressed: the thread pool is never destroyed but reachable from a global, and so is
// its threads' scratch from their thread-local storage, which LeakSanitizer counts as in use.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "case.h"

namespace {

namespace cpu = adapmixed::cpu;
using sanitize::Case;
using sanitize::Loss;
using sanitize::Reader;
using sanitize::Rows;
using sanitize::Screen;
using sanitize::Weighted;

constexpr int kCallers = 2;
constexpr int kThreadCounts[] = {1, 2, 3};
constexpr double kBalance = 1e-6;

std::atomic<std::int64_t> errors{0}, compared{0};

// A result buffer of exactly `count` elements that holds no valid answer yet.
std::vector<double> unknown(std::size_t count) { return std::vector<double>(count, std::nan("")); }

bool close(double got, double expected, double relative, double absolute) {
  if (std::isinf(expected) || std::isinf(got)) return got == expected;
  return std::fabs(got - expected) <= relative * std::fabs(expected) + absolute;  // not for NaN
}

class Run {
 public:
  Run(const Case& inputs, int threads) : in_(inputs), threads_(threads) {}

  void everything() const {
    log_sum_exp("private log_sum_exp", in_.private_rows, in_.shape.models);
    log_sum_exp("public log_sum_exp", in_.public_rows, 1);
    if (!in_.good) {
      undefined_rows(in_.private_rows.lse, in_.public_rows.lse);
      undefined_rows(std::vector<double>(rows()), std::vector<double>(positions()));
      return;
    }
    for (const Weighted& weighted : in_.weighted) {
      if (!weighted.ball.empty()) project(weighted);
      for (const Loss& loss : weighted.losses) leave_one_out(weighted, loss);
      mixture(weighted);
      log_prob(weighted);
    }
    for (std::int64_t model = 0; model < in_.shape.models; ++model) renyi_divergence(model);
    for (const Screen& options : in_.screens) screen(options);
    for (const std::vector<double>& normals : in_.normals) gaussian(normals);
    sample();
  }

 private:
  std::size_t rows() const { return in_.private_rows.lse.size(); }
  std::size_t positions() const { return in_.public_rows.lse.size(); }

  adapmixed::Ensemble ensemble() const {
    return {in_.shape, in_.private_rows.logits(), in_.public_rows.logits(),
            in_.private_rows.lse.data(), in_.public_rows.lse.data()};
  }

  void log_sum_exp(const char* what, const Rows& given, std::int64_t models) const {
    std::vector<double> lse = unknown(given.lse.size());
    std::vector<std::int32_t> status(given.status.size(), -1);
    cpu::log_sum_exp(given.logits(), models, in_.shape.positions, in_.shape.vocab, lse.data(),
                     status.data(), threads_);
    check_rows(what, given, lse, status);
  }

  void project(const Weighted& expected) const {
    std::vector<double> weight = unknown(rows()), complement = unknown(rows());
    cpu::project(ensemble(), expected.ball.at(0), expected.ball.at(1), weight.data(),
                 complement.data(), threads_);
    check("weight", weight, expected.weight, 1e-5, 0.0);
    // 1 - weight keeps digits of its own, but only weight has a bound between instruction sets.
    check("complement", complement, expected.complement, 1e-12, 1e-5);
  }

  void leave_one_out(const Weighted& given, const Loss& expected) const {
    std::vector<double> loss = unknown(expected.loss.size()), balance = unknown(rows());
    const double* mean = expected.mean_excess.empty() ? nullptr : expected.mean_excess.data();
    cpu::leave_one_out(ensemble(), weights(given),
                       {expected.orders.data(), static_cast<std::int64_t>(expected.orders.size()),
                        expected.zero_out, expected.num_models, mean},
                       loss.data(), balance.data(), threads_);
    check("loss", loss, expected.loss, 1e-5, 1e-12);
    check("balance", balance, std::vector<double>(rows(), 0.0), 0.0, kBalance);
  }

  void mixture(const Weighted& given) const {
    std::vector<double> probabilities = unknown(given.mixture.size());
    cpu::mixture(ensemble(), weights(given), probabilities.data(), threads_);
    check("mixture", probabilities, given.mixture, 1e-5, 1e-300);
  }

  void log_prob(const Weighted& given) const {
    std::vector<double> result = unknown(positions());
    cpu::log_prob(ensemble(), weights(given), in_.targets.data(), result.data(), threads_);
    check("log_prob", result, given.log_prob, 1e-5, 1e-12);
  }

  void renyi_divergence(std::int64_t model) const {
    const std::size_t size = positions() * in_.orders.size();
    const auto of_model = [&](const std::vector<double>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(size) * model;
      return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(size));
    };
    std::vector<double> forward = unknown(size), backward = unknown(size);
    adapmixed::Ensemble pairs = ensemble();
    pairs.shape.models = 1;
    pairs.private_logits = in_.private_rows.of_model(model);
    pairs.private_lse += model * in_.shape.positions;
    cpu::renyi_divergence(pairs, in_.orders.data(), static_cast<std::int64_t>(in_.orders.size()),
                          forward.data(), backward.data(), threads_);
    check("forward divergence", forward, of_model(in_.forward), 1e-5, 1e-12);
    check("backward divergence", backward, of_model(in_.backward), 1e-5, 1e-12);
  }

  void screen(const Screen& options) const {
    std::vector<double> divergence = unknown(positions());
    const std::vector<bool>::size_type count = positions();
    const std::unique_ptr<bool[]> passed(new bool[count]());
    const auto* active = reinterpret_cast<const bool*>(options.active.data());
    cpu::screen(
        ensemble(),
        {options.weight, options.order, options.threshold, options.top_k, options.num_models,
         options.active.empty() ? nullptr : active, options.noise.data()},
        divergence.data(), passed.get(), threads_);
    check("screening divergence", divergence, options.divergence, 1e-5, 1e-12);
    for (std::size_t b = 0; b < count; ++b) {
      const bool below = divergence[b] <= options.threshold;
      expect("passed", b, passed[b], below, passed[b] == below);
    }
  }

  void gaussian(const std::vector<double>& expected) const {
    std::vector<double> normals = unknown(expected.size());
    cpu::gaussian(in_.key.data(), in_.counter, 0.7, static_cast<std::int64_t>(normals.size()),
                  normals.data(), threads_);
    check("gaussian", normals, expected, 1e-12, 1e-12);
  }

  void sample() const {
    sample_from(in_.probabilities, in_.tokens, 0);
    std::vector<double> halved = in_.probabilities;  // no distribution: refused
    for (double& p : halved) p /= 2;
    sample_from(halved, std::vector<std::int64_t>(positions(), -1), 1);
  }

  void sample_from(const std::vector<double>& probabilities,
                   const std::vector<std::int64_t>& expected, std::int32_t code) const {
    std::vector<std::int64_t> tokens(positions(), -2);
    std::vector<std::int32_t> status(positions(), -1);
    cpu::sample(probabilities.data(), in_.public_rows.logits(), in_.shape.positions,
                in_.shape.vocab, in_.key.data(), in_.counter, tokens.data(), status.data(),
                threads_);
    for (std::size_t b = 0; b < positions(); ++b) {
      expect("sample status", b, status[b], code, status[b] == code);
      expect("token", b, static_cast<double>(tokens[b]), static_cast<double>(expected.at(b)),
             tokens[b] == expected.at(b));
    }
  }

  // Rows that change after their log-sum-exps were taken reach these operators. Whatever they
  // answer, they stay within their buffers and the language.
  void undefined_rows(const std::vector<double>& private_lse,
                      const std::vector<double>& public_lse) const {
    adapmixed::Ensemble rows_of = ensemble();
    rows_of.private_lse = private_lse.data(), rows_of.public_lse = public_lse.data();
    const std::vector<double> half(rows(), 0.5), orders{1.5, 18.0};
    std::vector<double> one = unknown(rows()), other = unknown(rows()), loss = unknown(2 * rows());
    std::vector<double> probabilities = unknown(positions() * in_.shape.vocab);
    cpu::project(rows_of, 18.0, 0.5, one.data(), other.data(), threads_);
    for (const bool zero_out : {false, true}) {
      cpu::leave_one_out(rows_of, {half.data(), half.data()},
                         {orders.data(), 2, zero_out, in_.shape.models, nullptr}, loss.data(),
                         one.data(), threads_);
    }
    cpu::mixture(rows_of, {half.data(), half.data()}, probabilities.data(), threads_);
    cpu::log_prob(rows_of, {half.data(), half.data()}, in_.targets.data(), one.data(), threads_);
  }

  static adapmixed::Weights weights(const Weighted& given) {
    return {given.weight.data(), given.complement.data()};
  }

  void check_rows(const char* what, const Rows& expected, const std::vector<double>& lse,
                  const std::vector<std::int32_t>& status) const {
    for (std::size_t k = 0; k < lse.size(); ++k) {
      expect("row status", k, status[k], expected.status[k], status[k] == expected.status[k]);
      if (status[k] == adapmixed::kRowOk) {
        expect(what, k, lse[k], expected.lse[k], close(lse[k], expected.lse[k], 1e-12, 1e-6));
      }
    }
  }

  void check(const char* what, const std::vector<double>& got, const std::vector<double>& expected,
             double relative, double absolute) const {
    if (got.size() != expected.size()) throw std::runtime_error("a result has another size");
    for (std::size_t k = 0; k < got.size(); ++k) {
      expect(what, k, got[k], expected[k], close(got[k], expected[k], relative, absolute));
    }
  }

  void expect(const char* what, std::size_t at, double got, double expected, bool good) const {
    compared.fetch_add(1, std::memory_order_relaxed);
    if (good || errors.fetch_add(1) >= 20) return;
    std::fprintf(stderr, "%s, %s, %d threads: %s[%zu] is %.17g, expected %.17g\n", in_.name.c_str(),
                 cpu::instruction_set(), threads_, what, at, got, expected);
  }

  const Case& in_;
  int threads_;
};

// Two callers take the cases in turn and meet in the pool. Nothing else orders them (relaxed): a
// race between two calls is not hidden by the list.
void run_all(const std::vector<Case>& cases, int threads) {
  std::atomic<std::size_t> taken{0};
  std::atomic<bool> failed{false};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      try {
        for (std::size_t k; (k = taken.fetch_add(1, std::memory_order_relaxed)) < cases.size();) {
          Run(cases[k], threads).everything();
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        failed = true;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  if (failed) std::exit(2);
}

int run(const char* path) {
  std::vector<Case> cases;
  {
    Reader in(path);
    for (std::int64_t left = in.integer(); left > 0; --left) cases.emplace_back(in);
  }
  int sets = 0, counts = 0;
  for (const char* name : {"scalar", "avx2", "avx512"}) {
    if (!cpu::use_instruction_set(name)) continue;
    ++sets;
    counts = 0;
    for (const int threads : kThreadCounts) {
      run_all(cases, threads);
      ++counts;
    }
  }
  const bool good = errors == 0 && compared > 0;
  std::printf("%s: %zu cases x %d instruction sets x %d thread counts, %lld results, %lld errors\n",
              ADAPMIXED_SANITIZE, cases.size(), sets, counts,
              static_cast<long long>(compared.load()), static_cast<long long>(errors.load()));
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CASES\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
    return 2;
  }
}
