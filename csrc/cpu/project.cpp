// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} for every row.
//
// Per row: d = p/q - 1 and r = p/q are formed once, from the exact difference of the logits, and
// kept in this thread's scratch; each evaluation of the two constraints is one pass over them.
#include "core/projection.h"

#include "core/elementary.h"
#include "cpu/parallel.h"
#include "cpu/public_row.h"
#include "cpu/rows.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

struct Sums {
  double forward = 0.0, forward_slope = 0.0;  // A or F/T, and its derivative by lambda
  double reverse = 0.0, reverse_slope = 0.0;
};

class RowProblem {
 public:
  RowProblem(const PublicRow& q, double order, double* scratch)
      : q_(q), order_(order), integer_(integer_order(order)), d_(scratch), r_(scratch + q.padded) {
    wild_lq_ = r_ + q.padded;
    wild_t_ = wild_lq_ + q.wild_count;
  }

  static std::int64_t scratch_size(std::int64_t padded, std::int64_t wild) {
    return 2 * padded + 2 * wild;
  }

  // False when the public row masks a token that this row does not: no lambda > 0 is feasible.
  template <Dtype D>
  bool load(const Row& private_row, double private_lse) {
    const double shift = private_lse - q_.lse;
    Vec second(0.0), steepest(0.0);
    Mask uncovered = Vec(0.0).is_nan();
    for (std::int64_t v = 0; v < q_.vocab; v += Vec::kLanes) {
      const Vec zi = load_logits<D>(private_row.data, v, q_.vocab);
      const Vec z0 = Vec::load(q_.logits + v);
      uncovered = uncovered | ((z0 == Vec(-HUGE_VAL)) & (zi > Vec(-HUGE_VAL)));
      const Vec q = Vec::load(q_.q + v);
      const Ratio<Vec> ratio_v = ratio(zi - z0 - Vec(shift));
      const auto present = q > Vec(0.0);
      const Vec d = vselect(present, ratio_v.d, Vec(0.0));
      d.store(d_ + v);
      vselect(present, ratio_v.r, Vec(1.0)).store(r_ + v);
      second = vfma(q * d, d, second);
      steepest = vmax(d * Vec::load(q_.inverse_reach + v), steepest);
    }
    second_moment_ = sum(second);
    steepest_ = maximum(steepest);
    wild_ = 0;
    for (std::int64_t k = 0; k < q_.wild_count; ++k) {
      const std::int64_t v = q_.wild[k];
      const double zi = private_row.at(v);
      const double t = zi - q_.logits[v] - shift;
      if (std::fabs(t) <= 1.0) continue;  // q < e^-680 times a bounded excess: nothing
      wild_lq_[wild_] = q_.logits[v] - q_.lse;
      wild_t_[wild_++] = t;
    }
    return !uncovered.any();
  }

  // F >= q_v (1 + lambda d_v)^alpha for each v alone: every token gives an upper bound on lambda.
  Point upper(double log_target) const {
    double weight = steepest_ > 1.0 ? 1.0 / steepest_ : 1.0;
    for (std::int64_t k = 0; k < wild_; ++k) {
      if (wild_t_[k] <= 1.0) continue;
      const double log_reach = (log_target - wild_lq_[k]) / order_;
      weight = std::fmin(weight, std::exp(std::fmin(0.0, log_reach - wild_t_[k] + 1.0)));
    }
    return weight < 1.0 ? shifted({0.0, 1.0}, weight) : Point{1.0, 0.0};
  }

  double second_moment() const { return second_moment_; }

  template <bool kForward, bool kReverse, bool kScaled>
  Sums evaluate(const Point& x, double log_target) const {
    Sums s = integer_ != 0 ? by_multiplication<kForward, kReverse, kScaled>(x, log_target)
                           : by_logarithm<kForward, kReverse, kScaled>(x, log_target);
    s.forward_slope *= order_;
    s.reverse_slope *= 1.0 - order_;
    add_wild<kScaled>(x, log_target, s);
    return s;
  }

 private:
  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_logarithm(const Point& x, double log_target) const {
    const Vec weight(x.weight), complement(x.complement), forward_power(order_),
        reverse_power(1.0 - order_), offset(log_target), tiny(std::numeric_limits<double>::min());
    Vec f(0.0), fs(0.0), g(0.0), gs(0.0);
    for (std::int64_t v = 0; v < q_.vocab; v += Vec::kLanes) {
      const Vec d = Vec::load(d_ + v);
      const Vec X = vfma(weight, Vec::load(r_ + v), complement);
      const Vec excess_x = weight * d;
      const LogParts<Vec> l = log_parts(excess_x, X);
      const Vec d_over_X = d / vmax(X, tiny);
      if constexpr (kScaled) {
        const Vec lq = Vec::load(q_.log_q + v) - offset;
        if constexpr (kForward) {
          const Vec term = exp_(vfma(forward_power, l.log, lq));
          f = f + term;
          fs = vfma(term, d_over_X, fs);
        }
        if constexpr (kReverse) {
          const Vec term = exp_(vfma(reverse_power, l.log, lq));
          g = g + term;
          gs = vfma(term, d_over_X, gs);
        }
      } else {
        const Vec q = Vec::load(q_.q + v);
        if constexpr (kForward) {
          const Power<Vec> w = power(excess_x, l, forward_power);
          f = vfma(q, w.excess, f);
          fs = vfma(q, vfma(w.value, d_over_X, Vec(0.0) - d), fs);
        }
        if constexpr (kReverse) {
          const Power<Vec> w = power(excess_x, l, reverse_power);
          g = vfma(q, w.excess, g);
          gs = vfma(q, vfma(w.value, d_over_X, Vec(0.0) - d), gs);
        }
      }
    }
    return {sum(f), sum(fs), sum(g), sum(gs)};
  }

  // Integer orders. The reverse side is (1+x) c_alpha(y), y = -x/(1+x). Scaled sums spread T over
  // the factors: a product above the range of double stands for an infeasible point.
  template <bool kForward, bool kReverse, bool kScaled>
  Sums by_multiplication(const Point& x, double log_target) const {
    const Vec weight(x.weight), complement(x.complement), order(order_);
    const Vec forward_scale(std::exp(-log_target / order_));
    const Vec reverse_scale(std::exp(-log_target / (order_ - 1.0)));
    const int k = integer_ - 1;
    Vec f(0.0), fs(0.0), g(0.0), gs(0.0);
    for (std::int64_t v = 0; v < q_.vocab; v += Vec::kLanes) {
      const Vec q = Vec::load(q_.q + v), d = Vec::load(d_ + v);
      const Vec X = vfma(weight, Vec::load(r_ + v), complement);
      if constexpr (kScaled) {
        if constexpr (kForward) {
          const Vec factor = X * forward_scale;
          const Vec part = q * integer_power(factor, k);
          f = vfma(part, factor, f);
          fs = vfma(part, forward_scale * d, fs);
        }
        if constexpr (kReverse) {
          const Vec inverse = Vec(1.0) / X;
          const Vec term = q * integer_power(inverse * reverse_scale, k);
          g = g + term;
          gs = vfma(term, inverse * d, gs);
        }
      } else {
        const Vec excess_x = weight * d;
        if constexpr (kForward) {
          const Chain<Vec> w = chain(excess_x, k);
          f = vfma(q, vfma(w.e, excess_x, w.c), f);
          fs = vfma(q * d, w.e, fs);
        }
        if constexpr (kReverse) {
          const Vec y = Vec(0.0) - excess_x / X;
          const Chain<Vec> w = chain(y, k);
          const Vec c = vfma(w.e, y, w.c);
          g = vfma(q * X, c, g);
          gs = vfma(q * d, vfma(order, y, c), gs);
        }
      }
    }
    return {sum(f), sum(fs), sum(g), sum(gs)};
  }

  // Tokens with q < e^-680, one by one in the log domain.
  template <bool kScaled>
  void add_wild(const Point& x, double log_target, Sums& s) const {
    const double offset = kScaled ? log_target : 0.0;
    for (std::int64_t k = 0; k < wild_; ++k) {
      const double lq = wild_lq_[k], t = wild_t_[k];
      const double log_r = std::log(x.weight) + t, log_c = std::log(x.complement);
      const double high = vmax(log_r, log_c);
      const double log_X = high == -HUGE_VAL
                               ? -HUGE_VAL
                               : high + std::log(std::exp(log_r - high) + std::exp(log_c - high));
      const double log_d = t > 0.0 ? t : 0.0;  // |d| <= max(r, 1), to far below any rounding
      const double sign = t > 0.0 ? 1.0 : -1.0;
      const double forward = lq + order_ * log_X - offset;
      const double reverse = lq + (1.0 - order_) * log_X - offset;
      // In excess form the linear term of the token goes too; its q itself is below all rounding.
      const double p = kScaled ? 0.0 : std::exp(lq + t);
      s.forward += std::exp(forward) - order_ * x.weight * p;
      s.forward_slope += order_ * (sign * std::exp(forward + log_d - log_X) - p);
      s.reverse += std::exp(reverse) + (order_ - 1.0) * x.weight * p;
      s.reverse_slope -= (order_ - 1.0) * (sign * std::exp(reverse + log_d - log_X) - p);
    }
  }

  const PublicRow& q_;
  double order_;
  int integer_;  // the order, or 0 if it is no integer
  double* d_;
  double* r_;
  double* wild_lq_;
  double* wild_t_;
  std::int64_t wild_ = 0;
  double second_moment_ = 0.0;
  double steepest_ = 0.0;
};

template <bool kForward, bool kReverse>
Sums evaluate_sums(const RowProblem& row, const Point& x, const Target& target) {
  return target.scaled ? row.evaluate<kForward, kReverse, true>(x, target.log_target)
                       : row.evaluate<kForward, kReverse, false>(x, target.log_target);
}

Point solve(const RowProblem& row, double order, double radius, const Target& target) {
  const auto evaluate = [&](const Point& x, bool want_forward, bool want_reverse, Bound& forward,
                            Bound& reverse) {
    if (!want_forward && !want_reverse) return;
    const Sums s = want_forward && want_reverse ? evaluate_sums<true, true>(row, x, target)
                   : want_forward               ? evaluate_sums<true, false>(row, x, target)
                                                : evaluate_sums<false, true>(row, x, target);
    // log(F / T), margin included: <= 0 exactly when feasible. inf - inf reads as infeasible.
    const auto gap = [&](double value) {
      if (!std::isfinite(value)) return HUGE_VAL;
      if (target.scaled) return std::log(value) + target.log_margin;
      const double g = std::log1p(value) - std::log1p(target.excess);
      return value <= target.excess ? std::fmin(g, 0.0)
                                    : std::fmax(g, std::numeric_limits<double>::min());
    };
    const double base = target.scaled ? 0.0 : 1.0;
    if (want_forward) {
      forward = forward_bound(gap(s.forward), base + s.forward, s.forward_slope, order);
    }
    if (want_reverse) {
      reverse =
          reverse_bound(gap(s.reverse), base + s.reverse, s.reverse_slope, order, x.complement);
    }
  };
  Point start = row.upper(target.log_target);
  const Point upper = start;
  if (!target.scaled) {
    if (target.excess <= 0.0) {
      // Only an exact copy of q is inside a ball of radius 0.
      Bound forward, reverse;
      evaluate({1.0, 0.0}, true, true, forward, reverse);
      return forward.value <= 0.0 && reverse.value <= 0.0 ? Point{1.0, 0.0} : Point{0.0, 1.0};
    }
    // A ~ alpha (alpha-1)/2 lambda^2 sum q d^2 for small lambda d.
    const double guess =
        std::sqrt(2.0 * target.excess / (order * (order - 1.0) * row.second_moment()));
    if (guess < 0.7 && guess < upper.weight) start = shifted({0.0, 1.0}, guess);
  }
  return largest_weight(evaluate, radius, start, upper);
}

void project(const Ensemble& in, double order, double radius, double* weight, double* complement,
             int threads) {
  const std::int64_t models = in.shape.models, positions = in.shape.positions;
  const std::int64_t vocab = in.shape.vocab, padded = round_up(vocab, 8);
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    double* memory = cpu::thread_scratch(PublicRow::scratch_size(padded, vocab) +
                                         RowProblem::scratch_size(padded, vocab));
    PublicRow q;
    std::int64_t loaded = -1;
    for (std::int64_t k = begin; k < end; ++k) {
      const std::int64_t position = k / models, model = k % models;
      const std::int64_t at = model * positions + position;
      weight[at] = 0.0;
      complement[at] = 1.0;
      const double lse = in.private_lse[at];
      if (!std::isfinite(lse) || !std::isfinite(in.public_lse[position])) continue;
      if (position != loaded) {
        q.load(row_of(in.public_logits, 0, position), in.public_lse[position], vocab, padded,
               memory);
        q.set_reach(order, (order - 1.0) * radius);
        loaded = position;
      }
      RowProblem row(q, order, memory + PublicRow::scratch_size(padded, vocab));
      const Row private_row = row_of(in.private_logits, model, position);
      bool covered = false;
      with_dtype(private_row.dtype,
                 [&](auto tag) { covered = row.load<decltype(tag)::value>(private_row, lse); });
      if (!covered) continue;
      const double ratio_error =
          1e-12 + 4.5e-16 * (std::fabs(lse) + std::fabs(in.public_lse[position]));
      const Point found = solve(row, order, radius, make_target(order, radius, ratio_error));
      weight[at] = found.weight;
      complement[at] = found.complement;
    }
  };
  // Ranges of whole runs of models share the public row's tables.
  const std::int64_t grain = models < 4 ? 1 : (models + 7) / 8;
  cpu::parallel_for(models * positions, grain, threads, rows);
}

}  // namespace

void add_project(cpu::Table& table) { table.project = project; }

ADAPMIXED_CORE_END
