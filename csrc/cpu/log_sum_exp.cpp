// lse = log sum_v exp(z_v) of every row, and what is wrong with a row that has none.
#include "core/elementary.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

template <Dtype D>
void one_row(const char* data, std::int64_t vocab, double* lse, std::int32_t* status) {
  Vec largest(-HUGE_VAL);
  Mask nan = Vec(0.0).is_nan();
  for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
    const Vec z = load_logits<D>(data, v, vocab);
    nan = nan | z.is_nan();
    largest = vmax(z, largest);
  }
  const double m = maximum(largest);
  *lse = std::nan("");
  if (nan.any()) {
    *status = kRowNan;
  } else if (m == HUGE_VAL) {
    *status = kRowPlusInf;
  } else if (m == -HUGE_VAL) {
    *status = kRowEmpty;
  } else if (std::fabs(m) > kMaxLogit) {
    *status = kRowTooLarge;
  } else {
    Vec total(0.0);
    for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
      total = total + exp_(load_logits<D>(data, v, vocab) - Vec(m));
    }
    *lse = m + std::log(sum(total));
    *status = kRowOk;
  }
}

void log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                 std::int64_t vocab, double* lse, std::int32_t* status, int threads) {
  cpu::parallel_for(models * positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row row = row_of(logits, k / positions, k % positions);
      with_dtype(row.dtype, [&](auto tag) {
        one_row<decltype(tag)::value>(row.data, vocab, lse + k, status + k);
      });
    }
  });
}

}  // namespace

void add_log_sum_exp(cpu::Table& table) { table.log_sum_exp = log_sum_exp; }

ADAPMIXED_CORE_END
