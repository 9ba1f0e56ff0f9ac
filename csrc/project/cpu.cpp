// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} of every private row,
// and the log-sum-exps of all rows.
//
// A row is solved in one of three ways, by the target T = e^{(alpha-1) R} and by what floats can
// decide: from a short list of tokens (cpu_listed_row.h), from float sums over the row
// (cpu_dense_row.h), or from double sums over the row (cpu_exact_row.h), which serve every input.
#include "common/dispatch.h"
#include "common/parallel.h"
#include "common/row_sums.h"
#include "project/cpu_dense_row.h"
#include "project/cpu_listed_row.h"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Solves rows of one call, position by position, with this thread's copies of the public row.
class Rows {
 public:
  Rows(const ProjectInputs& in, double order, double radius, const ProjectResults& out)
      : in_(in),
        problem_(order, radius),
        order_(order),
        radius_(radius),
        out_(out),
        vocab_(in.shape.vocab) {
    float_memory_ =
        cpu::thread_scratch(FloatPublic::scratch_size(vocab_) + ListedRow::scratch_size(vocab_) +
                                DenseRow::scratch_size(vocab_),
                            0);
  }

  void solve(std::int64_t position, std::int64_t model) {
    const std::int64_t at = model * in_.shape.positions + position;
    out_.weight[at] = 0.0;
    out_.complement[at] = 1.0;
    const Row row = row_of(in_.private_logits, model, position);
    with_dtype(row.dtype, [&](auto tag) { solve_row<decltype(tag)::value>(row, position, at); });
  }

 private:
  template <Dtype D>
  void solve_row(const Row& row, std::int64_t position, std::int64_t at) {
    const double public_lse = out_.public_lse[position];
    out_.status[at] = kRowOk;
    if (!std::isfinite(public_lse)) {
      log_sum_exp_row<D>(row.data, vocab_, out_.private_lse + at, out_.status + at);
      return;
    }
    if (float_position_ != position) {
      public_.load<D>(row_of(in_.public_logits, 0, position), public_lse, vocab_,
                      !problem_.listing(), float_memory_);
      float_position_ = position;
      floats_serve_ = problem_.listing() ? ListedRow::serves(public_, order_)
                                         : problem_.floats_serve() && DenseRow::serves(public_);
    }
    Point found{0.0, 1.0};
    const bool solved = floats_serve_ &&
                        (problem_.listing() ? listed<D>(row, at, found) : dense<D>(row, at, found));
    if (!solved) found = exact<D>(row, position, at);
    if (out_.status[at] != kRowOk || public_.uncovers(row)) found = {0.0, 1.0};
    out_.weight[at] = found.weight;
    out_.complement[at] = found.complement;
  }

  double* rest() { return float_memory_ + FloatPublic::scratch_size(vocab_); }

  template <Dtype D>
  bool listed(const Row& row, std::int64_t at, Point& found) {
    double& lse = out_.private_lse[at];
    lse = log_sum_exp_near<D>(row.data, vocab_, row.at(public_.top));
    if (std::isnan(lse)) return false;
    ListedRow lists(public_, row, lse, order_, problem_.log_target(), rest());
    return solve_lists(lists, order_, radius_, kDoubleRatioError, found);
  }

  template <Dtype D>
  bool dense(const Row& row, std::int64_t at, Point& found) {
    double& lse = out_.private_lse[at];
    lse = log_sum_exp_near<D>(row.data, vocab_, row.at(public_.top));
    DenseRow sums(public_, order_, rest());
    return !std::isnan(lse) && sums.load<D>(row, lse) && problem_.solve(sums, found);
  }

  template <Dtype D>
  Point exact(const Row& row, std::int64_t position, std::int64_t at) {
    double& lse = out_.private_lse[at];
    log_sum_exp_row<D>(row.data, vocab_, &lse, out_.status + at);
    if (out_.status[at] != kRowOk) return {0.0, 1.0};
    const std::int64_t padded = round_up(vocab_, 8);
    const std::int64_t public_size = PublicRow::scratch_size(padded, vocab_);
    double* memory = cpu::thread_scratch(public_size + ExactRow::scratch_size(padded, vocab_), 1);
    const double public_lse = out_.public_lse[position];
    if (exact_position_ != position) {
      exact_public_.load(row_of(in_.public_logits, 0, position), public_lse, vocab_, padded,
                         memory);
      exact_public_.set_reach(order_, problem_.log_target());
      exact_position_ = position;
    }
    ExactRow problem(order_);
    if (!problem.load<D>(exact_public_, row, lse, memory + public_size)) return {0.0, 1.0};
    return solve_whole(problem, order_, radius_, double_ratio_error(lse, public_lse));
  }

  const ProjectInputs& in_;
  FloatProblem problem_;
  double order_, radius_;
  const ProjectResults& out_;
  std::int64_t vocab_;
  double* float_memory_;
  FloatPublic public_{};
  PublicRow exact_public_{};
  std::int64_t float_position_ = -1, exact_position_ = -1;
  bool floats_serve_ = false;
};

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             int threads) {
  cpu::parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row row = row_of(in.public_logits, 0, k);
      with_dtype(row.dtype, [&](auto tag) {
        log_sum_exp_row<decltype(tag)::value>(row.data, in.shape.vocab, out.public_lse + k,
                                              out.public_status + k);
      });
    }
  });
  const std::int64_t models = in.shape.models;
  // One range of rows per thread: a range shares the public row's tables, and all rows take about
  // the same time.
  const std::int64_t parts = threads < 1 ? 1 : threads;
  const std::int64_t grain = (models + parts - 1) / parts;
  cpu::parallel_for(models * in.shape.positions, grain, threads,
                    [&](std::int64_t begin, std::int64_t end) {
                      Rows rows(in, order, radius, out);
                      for (std::int64_t k = begin; k < end; ++k) rows.solve(k / models, k % models);
                    });
}

}  // namespace

void add_project(cpu::Table& table) { table.project = project; }

ADAPMIXED_CORE_END
