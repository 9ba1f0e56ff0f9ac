// The logits of members that adapt the output layer; see low_rank/cpu.cpp. A warp takes one block
// of members on a tile of one position's tokens. It copies the tile's factors to shared memory a
// piece of each token at a time, since only that reads whole lines. There a lane has two members
// and every fourth token.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/staged.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kLowRankTile = kWarp;  // tokens, one for each lane to find
constexpr int kLowRankWarps = 4;
constexpr int kLowRankPiece = 256;                 // bytes of a token
constexpr int kLowRankPitch = kLowRankPiece + 32;  // so that four tokens lie in different banks
constexpr int kLowRankPairs = kLowRankBlock / 2;
constexpr int kLowRankEach = kLowRankTile / (kWarp / kLowRankPairs);  // tokens of a lane

// D: of the factors.
template <Dtype D>
__global__ void __launch_bounds__(kLowRankWarps* kWarp)
    add_low_rank_kernel(LowRankInputs in, LowRankResults out) {
  using Word = typename Bits<D>::type;
  struct alignas(2 * sizeof(Word)) Pair {
    Word first, second;
  };
  struct alignas(kCopied) Tile {
    char bytes[kLowRankTile * kLowRankPitch];
  };
  __shared__ Tile tiles[kLowRankWarps];
  constexpr int kRanks = kLowRankPiece / static_cast<int>(kLowRankBlock * sizeof(Word));
  constexpr int kCopies = kLowRankPiece / kCopied, kTogether = kWarp / kCopies;
  const std::int64_t models = in.shape.models, columns = in.shape.vocab;
  const std::int64_t blocks = (models + kLowRankBlock - 1) / kLowRankBlock;
  const std::int64_t groups = (blocks + kLowRankWarps - 1) / kLowRankWarps;
  const std::int64_t position = blockIdx.x % in.shape.positions;
  const std::int64_t rest = blockIdx.x / in.shape.positions;
  const std::int64_t block = rest % groups * kLowRankWarps + warp_id();
  const std::int64_t first = rest / groups * kLowRankTile;
  if (block >= blocks) return;  // the warps of a block do not meet
  const int lane = lane_id(), pair = lane % kLowRankPairs, group = lane / kLowRankPairs;
  char* const tile = tiles[warp_id()].bytes;

  const std::int64_t column = first + lane < columns ? first + lane : first;
  const std::int64_t token = in.tokens ? in.tokens[position * columns + column] : column;
  const bool known = 0 <= token && token < in.vocab;  // else its column is NaN
  const long long row = ((known ? token : 0) * blocks + block) * in.rank * kLowRankBlock;

  float sums[kLowRankEach][2];
  const std::int64_t model = block * kLowRankBlock + 2 * pair;
  const float* start = in.start + position * in.start_position + first;
  const float* starts[2] = {start + (model < models ? model : 0) * in.start_model,
                            start + (model + 1 < models ? model + 1 : 0) * in.start_model};
#pragma unroll
  for (int i = 0; i < kLowRankEach; ++i) {
    const int t = group + i * (kWarp / kLowRankPairs), at = first + t < columns ? t : 0;
    sums[i][0] = starts[0][at], sums[i][1] = starts[1][at];
  }
  const float* coefficients =
      in.coefficients + (position * blocks + block) * in.rank * kLowRankBlock + 2 * pair;
  for (std::int64_t begin = 0; begin < in.rank; begin += kRanks) {
    const int ranks = static_cast<int>(in.rank - begin < kRanks ? in.rank - begin : kRanks);
    const int size = ranks * static_cast<int>(kLowRankBlock * sizeof(Word));
    const int at = lane % kCopies * kCopied;  // of the bytes
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int t = kTogether * i + lane / kCopies;
      const auto* from = static_cast<const Word*>(in.factors) + __shfl_sync(kAllLanes, row, t);
      if (at < size) {
        copy_later(tile + t * kLowRankPitch + at,
                   reinterpret_cast<const char*>(from + begin * kLowRankBlock) + at);
      }
    }
    end_copies();
    await_copies<0>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kRanks; ++k) {
      if (k >= ranks) break;
      const float* c = coefficients + (begin + k) * kLowRankBlock;
      const float c0 = c[0], c1 = c[1];
      const char* of_k = tile + 2 * sizeof(Word) * (k * kLowRankPairs + pair);
#pragma unroll
      for (int i = 0; i < kLowRankEach; ++i) {
        const int t = group + i * (kWarp / kLowRankPairs);
        const Pair u = *reinterpret_cast<const Pair*>(of_k + t * kLowRankPitch);
        sums[i][0] = fmaf(c0, float_of<D>(u.first), sums[i][0]);
        sums[i][1] = fmaf(c1, float_of<D>(u.second), sums[i][1]);
      }
    }
    __syncwarp();  // before the next piece, or the results
  }

  float* const results = reinterpret_cast<float*>(tile);
  constexpr int kPitch = kLowRankTile + 1;
#pragma unroll
  for (int i = 0; i < kLowRankEach; ++i) {
    const int t = group + i * (kWarp / kLowRankPairs);
    results[2 * pair * kPitch + t] = sums[i][0];
    results[(2 * pair + 1) * kPitch + t] = sums[i][1];
  }
  __syncwarp();
  float* to = out.data + block * kLowRankBlock * out.stride_model + position * out.stride_position +
              first + lane;
  for (int m = 0; m < kLowRankBlock && block * kLowRankBlock + m < models; ++m) {
    if (first + lane < columns) *to = known ? results[m * kPitch + lane] : NAN;
    to += out.stride_model;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static void add_low_rank(const LowRankInputs& in, const LowRankResults& out, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t tiles = (in.shape.vocab + device::kLowRankTile - 1) / device::kLowRankTile;
  const std::int64_t a_group = kLowRankBlock * device::kLowRankWarps;  // of members
  const std::int64_t groups = (in.shape.models + a_group - 1) / a_group;
  const auto kernel = in.dtype == Dtype::f32 ? device::add_low_rank_kernel<Dtype::f32>
                                             : device::add_low_rank_kernel<Dtype::bf16>;
  launch(queue, kernel, grid_of(tiles * groups * in.shape.positions),
         dim3(device::kLowRankWarps * device::kWarp), 0, in, out);
}

void add_add_low_rank(Table& table) { table.add_low_rank = add_low_rank; }

}  // namespace adapmixed::cuda
