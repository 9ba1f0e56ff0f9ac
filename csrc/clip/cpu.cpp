// p_bar_i = clip(s p_i, c q, C q) of every row: log s, the ratio to q off the support of p_i, and
// the charges to the shards' own budgets.
#include <cstring>

#include "clip/cpu_row.h"
#include "common/excess_fit.h"
#include "common/parallel.h"

ADAPMIXED_CORE_BEGIN
namespace {

// The charges of one call. Moments of y serve if every |y| that the box admits is within their
// reach. Otherwise powers are summed.
class Charges {
 public:
  explicit Charges(const ClipOptions& options)
      : options_(options),
        scale_(options.lower, options.num_models),
        fits_(fits_of(options.orders, options.num_orders)) {
    const double largest = largest_of(options.orders, options.num_orders);
    const double most = std::fmax(1.0 - options.lower, options.upper - 1.0) / scale_.slots;
    moments_ = choose_moments(largest, most);
    moments_serve_ = moments_.reach >= most;
  }

  // Computes the charges from ratios(v), which gives p_bar / q of the tokens from v on.
  template <class Ratios>
  void add_up(const ClipPublic& q, const Ratios& ratios, double* charge) const {
    if (!moments_serve_) return by_powers(q, ratios, charge);
    const int degree = moments_.degree;
    double moments[kMaxMoments];
    with_degree(degree, [&](auto d) { sum_moments<decltype(d)::value>(q, ratios, moments); });
    for (std::int64_t k = 0; k < options_.num_orders; ++k) {
      double slope;
      const ExcessFit(&fits)[2] = fits_.of[k][moments_.index];
      charge[k] = scale_.of(fits[0].excess.sum(moments, degree, slope),
                            fits[1].excess.sum(moments, degree, slope), options_.orders[k]);
    }
  }

 private:
  template <int kDegree, class Ratios>
  void sum_moments(const ClipPublic& q, const Ratios& ratios, double* moments) const {
    Vec total[kDegree];
    for (int k = 0; k < kDegree; ++k) total[k] = Vec(0.0);
    const Vec unit(1.0 / (scale_.slots * moments_.reach));
    for (std::int64_t v = 0; v < q.padded; v += Vec::kLanes) {
      const Vec t = (ratios(v) - Vec(1.0)) * unit;
      Vec term = Vec::load(q.q + v) * t * t;
      ADAPMIXED_UNROLL
      for (int k = 0; k < kDegree; ++k) {
        total[k] = total[k] + term;
        term = term * t;
      }
    }
    for (int k = 0; k < kDegree; ++k) moments[k] = sum(total[k]);
  }

  template <class Ratios>
  void by_powers(const ClipPublic& q, const Ratios& ratios, double* charge) const {
    const Vec unit(1.0 / scale_.slots), others(scale_.others), one(1.0), zero(0.0);
    for (std::int64_t k = 0; k < options_.num_orders; ++k) {
      const double order = options_.orders[k];
      Vec forward(0.0), reverse(0.0);
      for (std::int64_t v = 0; v < q.padded; v += Vec::kLanes) {
        const Vec weight = Vec::load(q.q + v), ratio = ratios(v), y = (ratio - one) * unit;
        const LogParts<Vec> log = log_parts(y, (ratio + others) * unit);
        const Vec up = weight * power(y, log, Vec(order)).excess;
        const Vec down = weight * power(y, log, Vec(1.0 - order)).excess;
        forward = forward + vselect(weight > zero, up, zero);
        reverse = reverse + vselect(weight > zero, down, zero);
      }
      charge[k] = scale_.of(sum(forward), sum(reverse), order);
    }
  }

  const ClipOptions& options_;
  ChargeScale scale_;
  const ExcessFits<kMaxOrders>& fits_;
  MomentChoice moments_;
  bool moments_serve_;
};

// Solves the rows of one call, position by position, with this thread's copy of the public row.
class Rows {
 public:
  Rows(const ClipInputs& in, const ClipOptions& options, const Charges& charges,
       const ClipResults& out)
      : in_(in), options_(options), charges_(charges), out_(out), vocab_(in.shape.vocab) {
    memory_ =
        cpu::thread_scratch(ClipPublic::scratch_size(vocab_) + ClippedRow::scratch_size(vocab_));
  }

  void solve(std::int64_t position, std::int64_t model) {
    const std::int64_t at = model * in_.shape.positions + position;
    const Row row = row_of(in_.private_logits, model, position);
    with_dtype(row.dtype, [&](auto tag) { solve_row<decltype(tag)::value>(row, position, at); });
  }

 private:
  template <Dtype D>
  void solve_row(const Row& row, std::int64_t position, std::int64_t at) {
    out_.log_scale[at] = 0.0;
    out_.residual[at] = 1.0;
    out_.status[at] = kRowOk;
    for (std::int64_t k = 0; k < options_.num_orders; ++k) charge(at)[k] = HUGE_VAL;
    const double public_lse = in_.public_lse[position];
    double& lse = out_.private_lse[at];
    if (!std::isfinite(public_lse)) {
      log_sum_exp_row<D>(row.data, vocab_, &lse, out_.status + at);
      return;
    }
    if (position_ != position) {
      public_.load<D>(row_of(in_.public_logits, 0, position), public_lse, vocab_, memory_);
      position_ = position;
    }
    ClippedRow clipped(public_, options_.lower, options_.upper,
                       memory_ + ClipPublic::scratch_size(vocab_));
    lse = clipped.load<D>(row, out_.status + at);
    if (out_.status[at] != kRowOk) return;
    const bool is_public = std::memcmp(row.data, public_.row.data, vocab_ * kElementSize<D>) == 0;
    if (is_public || options_.lower == 1.0 || options_.upper == 1.0) {
      return answer_public(at, is_public);
    }
    // With c = 0 charges tell the smallest p apart.
    const bool exactly = options_.lower == 0.0 && options_.num_orders > 0;
    clipped.solve<D>(row, lse, exactly, out_.log_scale + at, out_.residual + at);
    if (options_.num_orders > 0) {
      charges_.add_up(public_, clipped.ratios(out_.log_scale[at], out_.residual[at]), charge(at));
    }
  }

  // p_bar = q, so nothing is charged.
  void answer_public(std::int64_t at, bool is_public) {
    if (is_public) out_.private_lse[at] = public_.lse;  // exactly, so that p / q is 1
    for (std::int64_t k = 0; k < options_.num_orders; ++k) charge(at)[k] = 0.0;
  }

  double* charge(std::int64_t at) const { return out_.charge + at * options_.num_orders; }

  const ClipInputs& in_;
  const ClipOptions& options_;
  const Charges& charges_;
  const ClipResults& out_;
  std::int64_t vocab_;
  double* memory_;
  ClipPublic public_{};
  std::int64_t position_ = -1;
};

void clip_project(const ClipInputs& in, const ClipOptions& options, const ClipResults& out,
                  int threads) {
  const Charges charges(options);
  const std::int64_t models = in.shape.models;
  // One range of rows per thread: a range shares the public row's copy, and all rows take about the
  // same time.
  const std::int64_t parts = threads < 1 ? 1 : threads;
  cpu::parallel_for(models * in.shape.positions, (models + parts - 1) / parts, threads,
                    [&](std::int64_t begin, std::int64_t end) {
                      Rows rows(in, options, charges, out);
                      for (std::int64_t k = begin; k < end; ++k) rows.solve(k / models, k % models);
                    });
}

}  // namespace

void add_clip_project(cpu::Table& table) { table.clip_project = clip_project; }

ADAPMIXED_CORE_END
