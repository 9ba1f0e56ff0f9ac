// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} and lse_i of every row.
// One block solves one row. All its threads search together: each evaluates its own tokens, and all
// see the same sums.
#include <algorithm>

#include "common/launch.cuh"
#include "common/log_sum_exp.cuh"
#include "common/row_pair.cuh"
#include "project/cuda_block_lists.cuh"
#include "project/cuda_block_row.cuh"
#include "project/cuda_call.cuh"
#include "project/cuda_floats.cuh"
#include "project/cuda_scan.cuh"
#include "project/cuda_solve_lists.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// The most threads that leave each the registers that the search needs.
constexpr int kProjectThreads = 256;

// A whole block must call this together. ratio_error: the relative error of p/q. kLists: use lists,
// for scaled targets only. Scaled targets can be solved without lists, but slowly.
template <Dtype D, bool kLists>
__device__ Point project_row(const RowPair<D>& pair, double order, double radius,
                             double ratio_error) {
  if (pair.uncovers()) return {0.0, 1.0};
  const double log_target = (order - 1.0) * radius;
  if constexpr (kLists) {
    __shared__ double log_q[kListCapacity], t[kListCapacity];
    BlockLists<D> lists(pair, order, log_target, log_q, t);
    Point found{0.0, 1.0};
    if (solve_lists(lists, order, radius, ratio_error, found)) return found;
  }
  BlockRow<RowPair<D>> row(pair, order);
  row.survey(log_target);
  return solve_whole(row, order, radius, ratio_error);
}

// Solves the rows that a first attempt has left, or every row if there was no attempt.
template <Dtype D, bool kLists>
__global__ void __launch_bounds__(kProjectThreads, 1)
    project_kernel(const __grid_constant__ ProjectCall call) {
  const RowAt at = row_at(call);
  if (call.done != nullptr && call.done[at.row]) return;
  const std::int64_t vocab = call.in.shape.vocab;
  const auto* row = row_bits<D>(call.in.private_logits, at.model, at.position);
  const RowSum sum = row_sum<D>(row, vocab);
  const double public_lse = call.in.public_lse[at.position];
  const bool public_ok = std::isfinite(public_lse);
  Point found{0.0, 1.0};
  if (sum.status == kRowOk && public_ok) {
    const RowPair<D> pair{row, row_bits<D>(call.in.public_logits, 0, at.position), vocab,
                          public_lse, sum.lse - public_lse};
    found = project_row<D, kLists>(pair, call.order, call.radius,
                                   double_ratio_error(sum.lse, public_lse));
  }
  if (threadIdx.x == 0) {
    call.out.weight[at.at] = found.weight;
    call.out.complement[at.at] = found.complement;
    call.out.private_lse[at.at] = sum.lse;
    call.out.status[at.at] = public_ok ? sum.status : kRowPublic;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

// Returns a number of threads: whole warps, and no more of them than there is work for.
dim3 threads_for(std::int64_t items, std::int64_t most) {
  const std::int64_t warps = (items + device::kWarp - 1) / device::kWarp;
  return dim3(static_cast<unsigned>(std::min(warps * device::kWarp, most)));
}

// The bytes of a row that stays in shared memory between two reads; 0 if it does not.
std::int64_t kept_bytes(const ProjectInputs& in) {
  const std::int64_t packs = (in.shape.vocab + device::kPack - 1) / device::kPack;
  const std::int64_t bytes = packs * device::kPack * device::element_size(in.private_logits.dtype);
  const bool kept = bytes <= device::kKeptBytes && most_shared_bytes() >= 2 * device::kKeptBytes;
  return kept ? bytes : 0;
}

// Queues the attempt that reads a row once or twice. call.done then marks the rows it has solved.
template <Dtype D>
void queue_first(const device::ProjectCall& call, bool lists, std::int64_t kept, dim3 grid,
                 const Queue& queue) {
  const std::int64_t packs = (call.in.shape.vocab + device::kPack - 1) / device::kPack;
  const dim3 scan = threads_for(packs, device::kScanThreads);
  if (lists) {
    launch(queue, device::project_scan_kernel<D, true>, grid, scan, static_cast<std::size_t>(kept),
           call);
    launch(queue, device::project_lists_kernel<D>, grid, dim3(device::kSolveThreads), 0, call);
  } else {
    launch(queue, device::project_scan_kernel<D, false>, grid, scan, 0, call);
    launch(queue, device::project_floats_kernel<D>, grid,
           threads_for(packs, device::kFloatSearchThreads), 0, call);
  }
}

}  // namespace

std::int64_t project_workspace(const Shape& shape) {
  return device::ProjectLayout(shape).bytes(shape);
}

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             const Queue& queue) {
  const DeviceGuard guard(queue);
  // Throws if the whole call is too large for one grid, although it is queued in groups.
  grid_of(in.shape.models * in.shape.positions);
  const device::FloatProblem problem(order, radius);
  const bool lists = problem.listing();
  const bool first_in_floats =
      (lists || problem.floats_serve()) && in.shape.vocab <= std::int64_t{1} << 30;
  const device::ProjectLayout layout(in.shape);
  const std::int64_t kept = lists ? kept_bytes(in) : 0;
  device::ProjectCall call{};
  call.in = in;
  call.order = order;
  call.radius = radius;
  call.out = out;
  call.kept = kept > 0;
  if (first_in_floats) {
    call.lists = static_cast<device::RowLists*>(queue.workspace);
    const std::int64_t rows = layout.group * in.shape.models;
    call.found = reinterpret_cast<std::int32_t*>(call.lists + rows);
    call.done = call.found + rows;
  }
  const std::int64_t group = first_in_floats ? layout.group : in.shape.positions;
  for (call.first = 0; call.first < in.shape.positions; call.first += group) {
    const std::int64_t here = std::min(group, in.shape.positions - call.first);
    const dim3 grid = grid_of(in.shape.models * here);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      constexpr Dtype kDtype = decltype(dtype)::value;
      if (first_in_floats) queue_first<kDtype>(call, lists, kept, grid, queue);
      const auto kernel =
          lists ? device::project_kernel<kDtype, true> : device::project_kernel<kDtype, false>;
      launch(queue, kernel, grid, threads_for(in.shape.vocab, device::kProjectThreads), 0, call);
    });
  }
}

}  // namespace adapmixed::cuda
