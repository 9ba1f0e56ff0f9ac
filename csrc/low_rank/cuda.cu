// The logits of members that adapt the output layer; see low_rank/cpu.cpp. One block takes a tile
// of one position's tokens, and each of its warps every fourth block of members.
#include "common/launch.cuh"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kLowRankTile = 32;  // tokens, whose results fill a line of a row
constexpr int kLowRankWarps = 4;
constexpr int kLowRankPairs = kLowRankTile / 2;

// D: of the factors.
template <Dtype D>
__global__ void __launch_bounds__(kLowRankWarps* kWarp)
    add_low_rank_kernel(LowRankInputs in, LowRankResults out) {
  static_assert(2 * kLowRankBlock == kWarp);  // half a warp has a lane for each member
  __shared__ float results[kLowRankWarps][kLowRankBlock][kLowRankTile + 1];
  const std::int64_t models = in.shape.models, columns = in.shape.vocab;
  const std::int64_t position = blockIdx.x % in.shape.positions;
  const std::int64_t first = blockIdx.x / in.shape.positions * kLowRankTile;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int half = lane / kLowRankBlock, member = lane % kLowRankBlock;
  const std::int64_t blocks = (models + kLowRankBlock - 1) / kLowRankBlock;
  const std::int64_t part = in.rank * kLowRankBlock;
  const typename Bits<D>::type* rows[kLowRankPairs];
  bool known[kLowRankPairs];  // a column of another token is NaN
#pragma unroll
  for (int i = 0; i < kLowRankPairs; ++i) {
    const std::int64_t wanted = first + 2 * i + half;
    const std::int64_t column = wanted < columns ? wanted : first;
    const std::int64_t token = in.tokens ? in.tokens[position * columns + column] : column;
    known[i] = 0 <= token && token < in.vocab;
    rows[i] = static_cast<const typename Bits<D>::type*>(in.factors);
    if (known[i]) rows[i] += token * blocks * part;
  }
  const float* start = in.start + position * in.start_position + first;
  for (std::int64_t block = warp; block < blocks; block += kLowRankWarps) {
    const std::int64_t model = block * kLowRankBlock + member;
    const std::int64_t own = (model < models ? model : 0) * in.start_model;
    const float* coefficients = in.coefficients + (position * blocks + block) * part + member;
    float sums[kLowRankPairs];
#pragma unroll
    for (int i = 0; i < kLowRankPairs; ++i) {
      const int t = 2 * i + half;
      sums[i] = start[own + (first + t < columns ? t : 0)];
    }
    for (std::int64_t k = 0; k < in.rank; ++k) {
      const float c = coefficients[k * kLowRankBlock];
      const std::int64_t at = block * part + k * kLowRankBlock + member;
#pragma unroll
      for (int i = 0; i < kLowRankPairs; ++i) sums[i] = fmaf(c, float_of<D>(rows[i][at]), sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kLowRankPairs; ++i) {
      results[warp][member][2 * i + half] = known[i] ? sums[i] : NAN;
    }
    __syncwarp();
    for (int m = 0; m < kLowRankBlock && block * kLowRankBlock + m < models; ++m) {
      float* row = out.data + (block * kLowRankBlock + m) * out.stride_model;
      if (first + lane < columns) {
        row[position * out.stride_position + first + lane] = results[warp][m][lane];
      }
    }
    __syncwarp();  // before the next results
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

void add_low_rank(const LowRankInputs& in, const LowRankResults& out, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t tiles = (in.shape.vocab + device::kLowRankTile - 1) / device::kLowRankTile;
  const auto kernel = in.dtype == Dtype::f32 ? device::add_low_rank_kernel<Dtype::f32>
                                             : device::add_low_rank_kernel<Dtype::bf16>;
  launch(queue, kernel, grid_of(tiles * in.shape.positions),
         dim3(device::kLowRankWarps * device::kWarp), 0, in, out);
}

}  // namespace adapmixed::cuda
