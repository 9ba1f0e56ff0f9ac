// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} of every private row,
// and the log-sum-exps of all rows.
//
// The first kernel reads all rows for their log-sum-exps (common/row_parts.cuh) and, for large
// targets, the scores of their tokens (cuda_scores.cuh). In the second a block solves a row: from
// short lists in double (cuda_block_lists.cuh), from sums in floats (cuda_floats.cuh), or, where
// these do not serve, from sums over the whole row in double (cuda_block_row.cuh). All its threads
// search together: each evaluates its own tokens, and all see the same sums.
#include "common/launch.cuh"
#include "common/row_pair.cuh"
#include "common/row_parts.cuh"
#include "project/cuda_block_lists.cuh"
#include "project/cuda_block_row.cuh"
#include "project/cuda_floats.cuh"
#include "project/cuda_scores.cuh"
#include "project/float_search.h"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// The most threads that leave each the registers that the search needs.
constexpr int kRowSearchThreads = 384;

struct ProjectCall {
  ProjectInputs in;
  double order, radius;
  ProjectResults out;
  RowParts cut;
  const RowPart* parts;         // (B, 1 + N, parts of a row)
  const std::uint32_t* scores;  // (B, 1 + N, parts, stretches, kWarp), for lists
};

// These must be called by a whole block together. ratio_error: the relative error of p/q.
template <bool kScaled, class Tokens>
__device__ Point solve_double(const Tokens& tokens, const ProjectCall& call, double ratio_error) {
  BlockRow<Tokens, kScaled> row(tokens, call.order);
  row.survey((call.order - 1.0) * call.radius);
  return solve_whole(row, call.order, call.radius, ratio_error);
}

template <Dtype D, bool kLists>
__device__ Point solve_row(const ProjectCall& call, const RowPair<D>& pair, double private_lse,
                           const std::uint32_t* scores, const RowPart* public_parts) {
  const double order = call.order, radius = call.radius;
  const FloatProblem problem(order, radius);
  const double ratio_error = double_ratio_error(private_lse, pair.public_lse);
  Point found{0.0, 1.0};
  // The host has chosen so. The compiler, being told, leaves out the sums of the other form.
  if (problem.listing() != kLists) return found;
  if constexpr (kLists) {
    __shared__ ListSource<D> source;
    source.set(pair, call.cut, public_parts, order, problem.log_target());
    auto* listed = dynamic_shared<ListedToken<D>>() + warp_id() * kListCapacity<D>;
    BlockLists<D> lists(source, scores, listed);
    if (solve_lists(lists, order, radius, ratio_error, found)) return found;
    if (lists.uncovers()) return {0.0, 1.0};
    return solve_double<kLists>(SourceTokens<D>{&source}, call, ratio_error);
  } else {
    if (problem.floats_serve() && pair.vocab <= std::int64_t{1} << 30) {
      FloatRow<D> row(pair, private_lse, order);
      const auto loaded = row.load();
      if (loaded == row.kUncovered) return found;
      if (loaded == row.kServed && problem.solve(row, found)) return found;
    }
    if (pair.uncovers()) return {0.0, 1.0};
    return solve_double<kLists>(pair, call, ratio_error);
  }
}

// One block takes one row. The rows of a position are next to each other.
template <Dtype D, bool kLists>
__global__ void __launch_bounds__(kLists ? kListThreads : kRowSearchThreads,
                                  kLists ? kListBlocks : 1)
    project_kernel(const __grid_constant__ ProjectCall call) {
  const unsigned models = static_cast<unsigned>(call.in.shape.models);
  const unsigned model = blockIdx.x % models, position = blockIdx.x / models;
  const std::int64_t at = model * call.in.shape.positions + position;
  const std::int64_t public_at = std::int64_t{position} * call.cut.rows;
  const std::int64_t row_at = public_at + 1 + model;
  const RowPart* public_parts = call.parts + public_at * call.cut.count;
  const std::int64_t words = std::int64_t{call.cut.count} * call.cut.stretches() * kWarp;
  const std::uint32_t* scores = call.scores + row_at * words;
  if (kLists) prefetch_words(scores, words);
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
  Point found{0.0, 1.0};
  if (sum.status == kRowOk && public_ok) {
    const RowPair<D> pair{row_bits<D>(call.in.private_logits, model, position),
                          row_bits<D>(call.in.public_logits, 0, position), call.in.shape.vocab,
                          public_sum.lse, sum.lse - public_sum.lse};
    found = solve_row<D, kLists>(call, pair, sum.lse, scores, public_parts);
  }
  if (threadIdx.x != 0) return;
  call.out.weight[at] = found.weight;
  call.out.complement[at] = found.complement;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

device::RowParts cut_of(const Shape& shape) {
  return {shape.positions, 1 + shape.models, shape.vocab};
}

}  // namespace

// The parts of all rows and, behind them, their scores.
std::int64_t project_workspace(const Shape& shape) {
  const device::RowParts cut = cut_of(shape);
  const std::int64_t words = cut.stretches() * device::kWarp;
  return cut.parts() *
         static_cast<std::int64_t>(sizeof(device::RowPart) + words * sizeof(std::uint32_t));
}

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::RowParts cut = cut_of(shape);
  const dim3 rows = grid_of(shape.models * shape.positions);
  auto* parts = static_cast<device::RowPart*>(queue.workspace);
  auto* scores = reinterpret_cast<std::uint32_t*>(parts + cut.parts());
  const device::ProjectCall call{in, order, radius, out, cut, parts, scores};
  const bool lists = device::FloatProblem(order, radius).listing();
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const auto run = [&](const auto& look, auto kernel, std::int64_t threads, int shared) {
      launch_row_parts<kDtype>(queue, in.private_logits, in.public_logits, cut, look, parts);
      launch(queue, kernel, rows, dim3(static_cast<unsigned>(threads)), shared, call);
    };
    if (lists) {
      run(device::ScoreLook{static_cast<float>(order), static_cast<float>(1.0 - order), scores},
          device::project_kernel<kDtype, true>, device::kListThreads, device::kListBytes);
    } else {
      run(device::NoLook{}, device::project_kernel<kDtype, false>,
          simulated_or(device::kRowSearchThreads, 64), 0);
    }
  });
}

}  // namespace adapmixed::cuda
