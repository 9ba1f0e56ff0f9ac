// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} of every private row,
// and the log-sum-exps of all rows.
//
// The first kernel reads all rows for their log-sum-exps (common/row_parts.cuh) and, for large
// targets, the scores of their tokens (cuda_row.cuh). In the second a block solves a row
// (cuda_row.cuh). All its threads search together: each evaluates its own tokens, and all see the
// same sums.
#include "common/launch.cuh"
#include "common/row_parts.cuh"
#include "project/cuda_row.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kProjectThreads = 256;

struct ProjectCall {
  ProjectInputs in;
  ProjectTarget target;
  ProjectResults out;
  RowParts cut;
  const RowPart* parts;         // (B, 1 + N, parts of a row)
  const std::uint32_t* scores;  // (B, 1 + N, parts, stretches, kWarp), for scaled sums
};

// One block takes one row. The rows of a position are next to each other.
template <Dtype D, bool kScaled>
__global__ void __launch_bounds__(kProjectThreads, 2)
    project_kernel(const __grid_constant__ ProjectCall call) {
  const unsigned models = static_cast<unsigned>(call.in.shape.models);
  const unsigned model = blockIdx.x % models, position = blockIdx.x / models;
  const std::int64_t at = model * call.in.shape.positions + position;
  const std::int64_t public_at = std::int64_t{position} * call.cut.rows;
  const std::int64_t row_at = public_at + 1 + model;
  const RowPart* public_parts = call.parts + public_at * call.cut.count;
  const std::int64_t words = std::int64_t{call.cut.count} * call.cut.stretches() * kWarp;
  const std::uint32_t* scores = call.scores + row_at * words;
  if (kScaled) prefetch_words(scores, words);
  // One warp for each of the two rows.
  __shared__ RowSum row_sums[2];
  if (warp_id() < 2) {
    const RowPart* parts = warp_id() == 0 ? public_parts : call.parts + row_at * call.cut.count;
    const RowSum found = row_sum<kWarp, 1>(parts, 1, call.cut.count);
    if (lane_id() == 0) row_sums[warp_id()] = found;
  }
  __syncthreads();
  const RowSum public_sum = row_sums[0], sum = row_sums[1];
  const bool public_ok = public_sum.status == kRowOk;
  if (threadIdx.x == 0) {  // before the search, which has no register to spare
    call.out.private_lse[at] = sum.lse;
    call.out.status[at] = public_ok ? sum.status : kRowPublic;
    if (model == 0) {
      call.out.public_lse[position] = public_sum.lse;
      call.out.public_status[position] = public_sum.status;
    }
  }
  double found = 0.0;
  if (sum.status == kRowOk && public_ok) {
    const int of_part = call.cut.stretches();
    BlockRow<D, kScaled> row(row_bits<D>(call.in.private_logits, model, position), sum.lse,
                             row_bits<D>(call.in.public_logits, 0, position), public_sum.lse,
                             call.in.shape.vocab, call.target,
                             {scores, public_parts, call.cut.count * of_part, of_part});
    found = solve_row<kScaled>(row, call.target);
    if (row.rare()) found = std::fmin(found, reverse_free(call.target.radius));
  }
  if (threadIdx.x != 0) return;
  call.out.weight[at] = found;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace {

device::RowParts cut_of(const Shape& shape) {
  return {shape.positions, 1 + shape.models, shape.vocab};
}

}  // namespace

// The parts of all rows and, behind them, their scores.
static std::int64_t project_workspace(const Shape& shape) {
  const device::RowParts cut = cut_of(shape);
  const std::int64_t words = cut.stretches() * device::kWarp;
  return cut.parts() *
         static_cast<std::int64_t>(sizeof(device::RowPart) + words * sizeof(std::uint32_t));
}

static void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
                    const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::RowParts cut = cut_of(shape);
  const dim3 rows = grid_of(shape.models * shape.positions);
  auto* parts = static_cast<device::RowPart*>(queue.workspace);
  auto* scores = reinterpret_cast<std::uint32_t*>(parts + cut.parts());
  const device::ProjectTarget target(order, radius);
  const device::ProjectCall call{in, target, out, cut, parts, scores};
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const auto run = [&](const auto& look, auto kernel) {
      launch_row_parts<kDtype>(queue, in.private_logits, in.public_logits, cut, look, parts);
      const auto threads = simulated_or(device::kProjectThreads, 64);
      launch(queue, kernel, rows, dim3(static_cast<unsigned>(threads)), 0, call);
    };
    if (target.scaled) {
      run(device::ScoreLook{static_cast<float>(target.order),
                            static_cast<float>(1.0 - target.order), scores},
          device::project_kernel<kDtype, true>);
    } else {
      run(device::NoLook{}, device::project_kernel<kDtype, false>);
    }
  });
}

void add_project(Table& table) {
  table.project = project;
  table.project_workspace = project_workspace;
}

}  // namespace adapmixed::cuda
