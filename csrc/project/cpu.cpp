// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} of every private row,
// and the log-sum-exps of all rows.
//
// project/search.h is the search, project/terms.h the sums that it takes.
#include "common/operators.h"
#include "common/parallel.h"
#include "common/row_sums.h"
#include "project/cpu_row.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Solves rows of one call, position by position, with this thread's copy of the public row.
class Rows {
 public:
  Rows(const ProjectInputs& in, const ProjectTarget& target, const ProjectResults& out)
      : in_(in), target_(target), out_(out), vocab_(in.shape.vocab) {
    const std::int64_t public_size = PublicRow::scratch_size(vocab_);
    memory_ = cpu::thread_scratch(public_size + round_up(vocab_, 64));
    rest_ = memory_ + public_size;
  }

  void solve(std::int64_t position, std::int64_t model) {
    const Row row = row_of(in_.private_logits, model, position);
    const std::int64_t at = model * in_.shape.positions + position;
    with_dtype(row.dtype, [&](auto tag) {
      out_.weight[at] = solve_row<decltype(tag)::value>(row, position, at);
    });
    out_.complement[at] = 1.0 - out_.weight[at];
  }

 private:
  template <Dtype D>
  double solve_row(const Row& row, std::int64_t position, std::int64_t at) {
    double& lse = out_.private_lse[at];
    out_.status[at] = kRowOk;
    const bool answered = std::isfinite(out_.public_lse[position]);
    if (answered && position_ != position) {
      public_.load<D>(row_of(in_.public_logits, 0, position), out_.public_lse[position], vocab_,
                      target_, memory_);
      position_ = position;
    }
    lse = answered ? log_sum_exp_near<D>(row.data, vocab_, row.at(public_.top)) : NAN;
    if (std::isnan(lse)) log_sum_exp_row<D>(row.data, vocab_, &lse, out_.status + at);
    if (!answered || out_.status[at] != kRowOk || public_.refuses(row, lse)) return 0.0;
    const FlushDenormals flush;
    PrivateRow<D> one(public_, row, lse, target_, rest_);
    const double found = target_.scaled ? adapmixed::ADAPMIXED_ISA::solve_row<true>(one, target_)
                                        : adapmixed::ADAPMIXED_ISA::solve_row<false>(one, target_);
    return public_.finite_rare ? std::fmin(found, reverse_free(target_.radius)) : found;
  }

  const ProjectInputs& in_;
  const ProjectTarget& target_;
  const ProjectResults& out_;
  std::int64_t vocab_;
  double *memory_, *rest_;
  PublicRow public_{};
  std::int64_t position_ = -1;
};

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             int threads) {
  const ProjectTarget target(order, radius);
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
                      Rows rows(in, target, out);
                      for (std::int64_t k = begin; k < end; ++k) rows.solve(k / models, k % models);
                    });
}

}  // namespace

void add_project(cpu::Table& table) { table.project = project; }

ADAPMIXED_CORE_END
