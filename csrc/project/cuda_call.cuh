// The arguments of the kernels of one projection. A first kernel reads every row (cuda_scan.cuh).
// The rows that it can prepare are solved from short lists in double (cuda_solve_lists.cuh) or from
// sums in floats (cuda_floats.cuh), the others from sums in double (cuda.cu). Positions are queued
// in groups that share the workspace.
#pragma once

#include "common/load.cuh"
#include "project/float_search.h"

ADAPMIXED_CORE_BEGIN

constexpr int kScanThreads = 384;
constexpr int kScanWarps = kScanThreads / 32;
// The most tokens that a warp of the first kernel may put on each of the two lists.
constexpr int kSegment = 192;
constexpr std::int64_t kProjectMemory = std::int64_t{1} << 26;  // bytes
// Rows up to this size stay in shared memory between two reads, if two of them fit a
// multiprocessor.
constexpr std::int64_t kKeptBytes = 110 * 1024;

struct RowLists {
  std::int32_t count[2][kScanWarps];  // more than kSegment: too many
  std::int32_t tokens[2][kScanWarps][kSegment];
};

struct ProjectLayout {
  std::int64_t group;  // positions that share the workspace

  ProjectLayout() = default;
  explicit ProjectLayout(const Shape& shape) {
    const std::int64_t memory = simulated_or(kProjectMemory, 8 * bytes_a_row());
    const std::int64_t fit = memory / (shape.models * bytes_a_row() + 1);
    group = fit < 1 ? 1 : fit < shape.positions ? fit : shape.positions;
  }
  static std::int64_t bytes_a_row() { return static_cast<std::int64_t>(sizeof(RowLists)) + 8; }
  std::int64_t bytes(const Shape& shape) const { return group * shape.models * bytes_a_row(); }
};

struct ProjectCall {
  ProjectInputs in;
  double order, radius;
  ProjectResults out;
  std::int64_t first;  // first position of this group
  bool kept;           // rows stay in shared memory
  // In the workspace, (group, N): the lists that the first kernel leaves to the second; whether it
  // has prepared the row for the second; and whether one of them has found the row's weight. Null
  // if there is no such attempt.
  RowLists* lists;
  std::int32_t *found, *done;
};

// The row that a block works on. The rows of a position are next to each other.
struct RowAt {
  std::int64_t row, model, position, at;
};
__device__ inline RowAt row_at(const ProjectCall& call) {
  const std::int64_t row = blockIdx.x, models = call.in.shape.models;
  const std::int64_t model = row % models, position = call.first + row / models;
  return {row, model, position, model * call.in.shape.positions + position};
}

__device__ inline void set_weight(const ProjectCall& call, const RowAt& row, const Point& found) {
  call.out.weight[row.at] = found.weight;
  call.out.complement[row.at] = found.complement;
  call.done[row.row] = 1;
}

ADAPMIXED_CORE_END
