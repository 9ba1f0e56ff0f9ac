// lse = log sum_v exp(z_v) of every row, or the status of a row without one.
#include "common/float_rows.h"
#include "common/operators.h"
#include "common/parallel.h"
#include "common/row_sums.h"

ADAPMIXED_CORE_BEGIN
namespace {

void log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                 std::int64_t vocab, double* lse, std::int32_t* status, int threads) {
  cpu::parallel_for(models * positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row row = row_of(logits, k / positions, k % positions);
      with_dtype(row.dtype, [&](auto tag) {
        log_sum_exp_row<decltype(tag)::value>(row.data, vocab, lse + k, status + k);
      });
    }
  });
}

void near_log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                      std::int64_t vocab, const std::int64_t* near, double* lse, int threads) {
  cpu::parallel_for(models * positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row row = row_of(logits, k / positions, k % positions);
      with_dtype(row.dtype, [&](auto tag) {
        lse[k] =
            float_log_sum_exp<decltype(tag)::value>(row.data, vocab, row.at(near[k % positions]));
      });
    }
  });
}

}  // namespace

void add_log_sum_exp(cpu::Table& table) {
  table.log_sum_exp = log_sum_exp;
  table.near_log_sum_exp = near_log_sum_exp;
}

ADAPMIXED_CORE_END
