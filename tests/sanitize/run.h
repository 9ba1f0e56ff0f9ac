// Runs every C++ entry point on one case and compares the results with the case's answers.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "case.h"
#include "common/operators.h"

namespace sanitize {

// The absolute error of a projection's log-sum-exps from float sums.
constexpr double kLse = 1e-9;
constexpr double kBalance = 1e-5;  // callers of leave_one_out reject losses with a larger balance
constexpr double kLossExcess = 4e-4;  // that leave_one_out states at the highest orders

inline std::atomic<std::int64_t> errors{0}, compared{0};

// A result buffer of exactly `count` elements, filled with NaN.
inline std::vector<double> unknown(std::size_t count) {
  return std::vector<double>(count, std::nan(""));
}

inline bool close(double got, double expected, double relative, double absolute) {
  if (std::isinf(expected) || std::isinf(got)) return got == expected;
  return std::fabs(got - expected) <= relative * std::fabs(expected) + absolute;  // false for NaN
}

// The bytes of a call's workspace.
template <class... P, class... A>
std::int64_t bytes(std::int64_t (*of_call)(P...), const A&... arguments) {
  return of_call == nullptr ? 0 : of_call(arguments...);
}

// Backend: has `operators()`, a table of common/operators.h, and `where(bytes)`, which returns the
// last argument of a call with such a workspace.
template <class Backend>
class Run {
 public:
  // setting: named in error messages next to the case.
  Run(const Case& inputs, const Backend& backend, std::string setting)
      : in_(inputs),
        backend_(backend),
        operators_(backend.operators()),
        setting_(std::move(setting)) {}

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
    for (const Pool& pool : in_.pools) log_pool(pool);
    for (const Box& box : in_.boxes) clip_project(box);
    for (std::int64_t model = 0; model < in_.shape.models; ++model) renyi_divergence(model);
    for (const Screen& options : in_.screens) screen(options);
    for (const std::vector<double>& normals : in_.normals) gaussian(normals);
    sample();
  }

 private:
  std::size_t rows() const { return in_.private_rows.lse.size(); }
  std::size_t positions() const { return in_.public_rows.lse.size(); }

  auto loss_where(const std::vector<double>& orders) const {
    const auto count = static_cast<std::int64_t>(orders.size());
    return backend_.where(bytes(operators_.leave_one_out_workspace, in_.shape, count));
  }

  auto mixture_where() const {
    return backend_.where(bytes(operators_.mixture_workspace, in_.shape));
  }

  adapmixed::Ensemble ensemble() const {
    return {in_.shape, in_.private_rows.logits(), in_.public_rows.logits(),
            in_.private_rows.lse.data(), in_.public_rows.lse.data()};
  }

  adapmixed::ProjectInputs inputs() const {
    return {in_.shape, in_.private_rows.logits(), in_.public_rows.logits()};
  }

  adapmixed::ClipInputs clip_inputs(const std::vector<double>& public_lse) const {
    return {in_.shape, in_.private_rows.logits(), in_.public_rows.logits(), public_lse.data()};
  }

  // The log-sum-exps and statuses that a projection finds.
  struct Found {
    std::vector<double> lse, public_lse;
    std::vector<std::int32_t> status, public_status;
  };

  Found found() const {
    return {unknown(rows()), unknown(positions()), std::vector<std::int32_t>(rows(), -1),
            std::vector<std::int32_t>(positions(), -1)};
  }

  void log_sum_exp(const char* what, const Rows& given, std::int64_t models) const {
    std::vector<double> lse = unknown(given.lse.size());
    std::vector<std::int32_t> status(given.status.size(), -1);
    const adapmixed::Shape shape{models, in_.shape.positions, in_.shape.vocab};
    operators_.log_sum_exp(given.logits(), models, shape.positions, shape.vocab, lse.data(),
                           status.data(),
                           backend_.where(bytes(operators_.log_sum_exp_workspace, shape)));
    check_rows(what, given, lse, status);
  }

  void project(const Weighted& expected) const {
    std::vector<double> weight = unknown(rows());
    Found sums = found();
    operators_.project(inputs(), expected.ball.at(0), expected.ball.at(1),
                       {weight.data(), sums.lse.data(), sums.status.data(), sums.public_lse.data(),
                        sums.public_status.data()},
                       backend_.where(bytes(operators_.project_workspace, in_.shape)));
    check("weight", weight, expected.weight, 2.1e-4, 0.0);
    check("projection's log-sum-exp", sums.lse, in_.private_rows.lse, 0.0, kLse);
    check_status("projection's status", in_.private_rows, sums.status);
    check_rows("projection's public row", in_.public_rows, sums.public_lse, sums.public_status);
  }

  void clip_project(const Box& box) const {
    std::vector<double> scale = unknown(rows()), residual = unknown(rows()), lse = unknown(rows());
    std::vector<double> charge = unknown(box.charge.size()), balance = unknown(rows());
    std::vector<double> mixed = unknown(box.mixture.size()), loss = unknown(box.loss.size());
    std::vector<std::int32_t> status(rows(), -1);
    const auto orders = static_cast<std::int64_t>(box.orders.size());
    operators_.clip_project(
        clip_inputs(in_.public_rows.lse),
        {box.lower, box.upper, box.orders.data(), orders, box.num_models},
        {scale.data(), residual.data(), charge.data(), lse.data(), status.data()},
        backend_.where(bytes(operators_.clip_project_workspace, in_.shape)));
    check("charge", charge, box.charge, 1e-5, 1e-12);
    check("clipping's log-sum-exp", lse, in_.private_rows.lse, 0.0, kLse);
    check_status("clipping's status", in_.private_rows, status);
    const auto* active = reinterpret_cast<const bool*>(box.active.data());
    const adapmixed::Weights weights{box.log_scale.data(), box.residual.data(), box.lower,
                                     box.upper, box.active.empty() ? nullptr : active};
    operators_.mixture(ensemble(), weights, mixed.data(), mixture_where());
    check("clipped mixture", mixed, box.mixture, 1e-9, 1e-300);
    operators_.leave_one_out(ensemble(), weights,
                             {box.orders.data(), orders, false, in_.shape.models}, loss.data(),
                             balance.data(), loss_where(box.orders));
    check("clipped loss", loss, box.loss, kLossExcess, 1e-9);
  }

  void leave_one_out(const Weighted& given, const Loss& expected) const {
    std::vector<double> loss = unknown(expected.loss.size()), balance = unknown(rows());
    operators_.leave_one_out(
        ensemble(), weights(given),
        {expected.orders.data(), static_cast<std::int64_t>(expected.orders.size()),
         expected.zero_out, expected.num_models},
        loss.data(), balance.data(), loss_where(expected.orders));
    check("loss", loss, expected.loss, kLossExcess, 1e-9);
    check("balance", balance, std::vector<double>(rows(), 0.0), 0.0, kBalance);
  }

  void mixture(const Weighted& given) const {
    std::vector<double> probabilities = unknown(given.mixture.size());
    operators_.mixture(ensemble(), weights(given), probabilities.data(), mixture_where());
    check("mixture", probabilities, given.mixture, 1e-9, 1e-300);
  }

  void log_prob(const Weighted& given) const {
    std::vector<double> result = unknown(positions());
    operators_.log_prob(ensemble(), weights(given), in_.targets.data(), result.data(),
                        backend_.where());
    check("log_prob", result, given.log_prob, 1e-9, 1e-9);
  }

  static adapmixed::LogPoolOptions options_of(const Pool& pool) {
    const auto* active = reinterpret_cast<const bool*>(pool.active.data());
    return {pool.lower, pool.upper, pool.scale, pool.num_models,
            pool.active.empty() ? nullptr : active};
  }

  adapmixed::LogPoolInputs rows_alone() const {
    return {in_.shape, in_.private_rows.logits(), in_.public_rows.logits(), nullptr};
  }

  // The largest difference of a private row's log-sum-exp between two instruction sets: twice the
  // error that log_pool states.
  static constexpr double kPoolSum = 1.4e-6;

  void log_pool(const Pool& expected) const {
    std::vector<double> normaliser = unknown(positions()), span = unknown(rows());
    std::vector<double> lse = unknown(rows()), public_lse = unknown(positions());
    std::vector<std::int32_t> status(rows(), -1), public_status(positions(), -1);
    std::vector<double> log_weights = unknown(expected.log_weights.size());
    const adapmixed::LogPoolOptions options = options_of(expected);
    operators_.log_pool(rows_alone(), options,
                        {normaliser.data(), span.data(), lse.data(), status.data(),
                         public_lse.data(), public_status.data(), log_weights.data()},
                        backend_.where(bytes(operators_.log_pool_workspace, in_.shape)));
    check("pool's log-normaliser", normaliser, expected.log_normaliser, 0.0,
          expected.scale * kPoolSum);
    check("span", span, expected.span, 0.0, kPoolSum);
    check_status("pool's status", in_.private_rows, status);
    check_status("pool's public status", in_.public_rows, public_status);
    check("pool's log-weights", log_weights, expected.log_weights, 0.0, expected.scale * kPoolSum);
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
    operators_.renyi_divergence(pairs, in_.orders.data(),
                                static_cast<std::int64_t>(in_.orders.size()), forward.data(),
                                backward.data(), backend_.where());
    check("forward divergence", forward, of_model(in_.forward), 5e-5, 1e-9);
    check("backward divergence", backward, of_model(in_.backward), 5e-5, 1e-9);
  }

  void screen(const Screen& options) const {
    std::vector<double> divergence = unknown(positions());
    const std::vector<bool>::size_type count = positions();
    const std::unique_ptr<bool[]> passed(new bool[count]());
    const auto* active = reinterpret_cast<const bool*>(options.active.data());
    std::vector<double> log_ratios = unknown(options.noise.size());
    operators_.screen(ensemble(),
                      {options.weight, options.order, options.threshold, options.top_k,
                       options.num_models, options.active.empty() ? nullptr : active,
                       options.noise.data(), options.tokens.data(), log_ratios.data()},
                      divergence.data(), passed.get(), backend_.where());
    check("screening divergence", divergence, options.divergence, 1e-5, 1e-12);
    for (std::size_t b = 0; b < count; ++b) {
      const bool below = divergence[b] <= options.threshold;
      expect("passed", b, passed[b], below, passed[b] == below);
    }
  }

  void gaussian(const std::vector<double>& expected) const {
    std::vector<double> normals = unknown(expected.size());
    operators_.gaussian(in_.key.data(), in_.counter, 0.7, static_cast<std::int64_t>(normals.size()),
                        normals.data(), backend_.where());
    check("gaussian", normals, expected, 1e-12, 1e-12);
  }

  void sample() const {
    sample_from(in_.probabilities, in_.tokens, 0);
    std::vector<double> halved = in_.probabilities;  // not a distribution, so it is rejected
    for (double& p : halved) p /= 2;
    sample_from(halved, std::vector<std::int64_t>(positions(), -1), 1);
  }

  void sample_from(const std::vector<double>& probabilities,
                   const std::vector<std::int64_t>& expected, std::int32_t code) const {
    std::vector<std::int64_t> tokens(positions(), -2);
    std::vector<std::int32_t> status(positions(), -1);
    operators_.sample(
        probabilities.data(), in_.public_rows.logits(), in_.shape.positions, in_.shape.vocab,
        in_.key.data(), in_.counter, tokens.data(), status.data(),
        backend_.where(bytes(operators_.sample_workspace, in_.shape.positions, in_.shape.vocab)));
    for (std::size_t b = 0; b < positions(); ++b) {
      expect("sample status", b, status[b], code, status[b] == code);
      expect("token", b, static_cast<double>(tokens[b]), static_cast<double>(expected.at(b)),
             tokens[b] == expected.at(b));
    }
  }

  // Rows that change after their log-sum-exps were taken can reach these operators. Their answers
  // are not checked, but they must stay within their buffers and have no undefined behaviour.
  void undefined_rows(const std::vector<double>& private_lse,
                      const std::vector<double>& public_lse) const {
    adapmixed::Ensemble rows_of = ensemble();
    rows_of.private_lse = private_lse.data(), rows_of.public_lse = public_lse.data();
    const std::vector<double> half(rows(), 0.5), orders{1.5, 18.0};
    std::vector<double> one = unknown(rows()), other = unknown(rows()), loss = unknown(2 * rows());
    std::vector<double> probabilities = unknown(positions() * in_.shape.vocab);
    constexpr double kBalls[][2] = {{18.0, 3.6}, {3.0, 0.03}, {2.0, 0.5}, {18.0, 0.3}};
    for (const auto& ball : kBalls) {
      Found sums = found();
      operators_.project(inputs(), ball[0], ball[1],
                         {one.data(), sums.lse.data(), sums.status.data(), sums.public_lse.data(),
                          sums.public_status.data()},
                         backend_.where(bytes(operators_.project_workspace, in_.shape)));
      // On CUDA a row below a bad public row is told so.
      for (std::size_t k = 0; k < rows(); ++k) {
        const std::int32_t own = in_.private_rows.status[k], found = sums.status[k];
        const bool below = in_.public_rows.status[k % positions()] != adapmixed::kRowOk;
        expect("refused row's status", k, found, own,
               found == own || (below && found == adapmixed::kRowPublic));
      }
      check_status("refused row's public status", in_.public_rows, sums.public_status);
    }
    for (const double lower : {0.5, 0.0}) {
      std::vector<double> lse = unknown(rows());
      std::vector<std::int32_t> status(rows(), -1);
      operators_.clip_project(clip_inputs(public_lse),
                              {lower, 2.0, orders.data(), 2, in_.shape.models},
                              {one.data(), other.data(), loss.data(), lse.data(), status.data()},
                              backend_.where(bytes(operators_.clip_project_workspace, in_.shape)));
      check_status("refused row's status", in_.private_rows, status);
    }
    for (const bool zero_out : {false, true}) {
      operators_.leave_one_out(rows_of, {half.data(), nullptr},
                               {orders.data(), 2, zero_out, in_.shape.models}, loss.data(),
                               one.data(), loss_where(orders));
    }
    operators_.mixture(rows_of, {half.data(), nullptr}, probabilities.data(), mixture_where());
    operators_.log_prob(rows_of, {half.data(), nullptr}, in_.targets.data(), one.data(),
                        backend_.where());
    const adapmixed::LogPoolOptions pool{-0.25, 1.0, 2.0, in_.shape.models, nullptr};
    std::vector<double> normaliser = unknown(positions()), found = unknown(positions());
    std::vector<std::int32_t> status(rows(), -1), public_status(positions(), -1);
    std::vector<double> log_weights = unknown(positions() * in_.shape.vocab);
    operators_.log_pool(rows_alone(), pool,
                        {normaliser.data(), one.data(), other.data(), status.data(), found.data(),
                         public_status.data(), log_weights.data()},
                        backend_.where(bytes(operators_.log_pool_workspace, in_.shape)));
    check_status("refused row's public status", in_.public_rows, public_status);
  }

  static adapmixed::Weights weights(const Weighted& given) {
    return {given.weight.data(), nullptr};
  }

  void check_rows(const char* what, const Rows& expected, const std::vector<double>& lse,
                  const std::vector<std::int32_t>& status) const {
    check_status("row status", expected, status);
    for (std::size_t k = 0; k < lse.size(); ++k) {
      if (status[k] == adapmixed::kRowOk) {
        expect(what, k, lse[k], expected.lse[k], close(lse[k], expected.lse[k], 1e-12, 1e-6));
      }
    }
  }

  void check_status(const char* what, const Rows& expected,
                    const std::vector<std::int32_t>& status) const {
    for (std::size_t k = 0; k < status.size(); ++k) {
      expect(what, k, status[k], expected.status[k], status[k] == expected.status[k]);
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
    std::fprintf(stderr, "%s, %s: %s[%zu] is %.17g, expected %.17g\n", in_.name.c_str(),
                 setting_.c_str(), what, at, got, expected);
  }

  const Case& in_;
  const Backend& backend_;
  const std::decay_t<decltype(std::declval<Backend>().operators())>& operators_;
  std::string setting_;
};

}  // namespace sanitize
