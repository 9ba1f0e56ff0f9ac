// lse = log sum_v exp(z_v) of every row, or the status of a row without one. The first kernel takes
// parts of rows (common/row_parts.cuh). In the second a warp adds up those of a row.
#include "common/row_parts.cuh"

ADAPMIXED_CORE_BEGIN

static __global__ void log_sum_exp_kernel(const RowPart* parts,
                                          const __grid_constant__ RowParts cut, double* lse,
                                          std::int32_t* status) {
  const std::int64_t at = warp_of_grid();
  if (at >= cut.positions * cut.rows) return;  // true for the whole warp
  const RowSum sum = row_sum<kWarp, 1>(parts + at * cut.count, 1, cut.count);
  if (lane_id() != 0) return;
  const std::int64_t position = at / cut.rows, model = at % cut.rows;
  lse[model * cut.positions + position] = sum.lse;
  status[model * cut.positions + position] = sum.status;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static std::int64_t log_sum_exp_workspace(const Shape& shape) {
  const device::RowParts cut(shape.positions, shape.models, shape.vocab);
  return cut.parts() * static_cast<std::int64_t>(sizeof(device::RowPart));
}

static void log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                        std::int64_t vocab, double* lse, std::int32_t* status, const Queue& queue) {
  const DeviceGuard guard(queue);
  const device::RowParts cut(positions, models, vocab);
  auto* parts = static_cast<device::RowPart*>(queue.workspace);
  // The first model's row takes the place of the public one.
  Logits others = logits;
  others.data = device::row_of(logits, 1, 0).data;
  with_dtype(logits.dtype, [&](auto dtype) {
    launch_row_parts<decltype(dtype)::value>(queue, others, logits, cut, device::NoLook{}, parts);
  });
  launch_warps(queue, device::log_sum_exp_kernel, models * positions, parts, cut, lse, status);
}

void add_log_sum_exp(Table& table) {
  table.log_sum_exp = log_sum_exp;
  table.log_sum_exp_workspace = log_sum_exp_workspace;
}

}  // namespace adapmixed::cuda
