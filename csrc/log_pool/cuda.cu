// p(v) ~ q(v) exp((kappa/N) sum_i u_i(v)), u_i(v) = clip(log p_i(v) - log q(v), a, b).
// log_pool/formula.h has the derivation and the rounding, cuda_kernel.cuh the kernels.
#include <cstdint>
#include <limits>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "log_pool/cuda_kernel.cuh"
#include "log_pool/cuda_rows.cuh"
#include "log_pool/formula.h"

namespace adapmixed::cuda {

static std::int64_t tiles_of(const Shape& shape) {
  return (shape.vocab + device::kPoolTile - 1) / device::kPoolTile;
}

// The workspace holds PoolMemory's arrays.
static std::int64_t log_pool_workspace(const Shape& shape) {
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab);
  const std::int64_t parts = sizeof(device::RowPart) * cut.rows * cut.count;
  const std::int64_t tiles = sizeof(device::PoolTile) * device::kPoolWarps * tiles_of(shape);
  return shape.positions * (parts + tiles + static_cast<std::int64_t>(sizeof(unsigned)));
}

// How many tiles a block takes. More leave fewer blocks that add up the parts of all rows, which
// takes about a quarter of a tile's time. But the blocks should fill the GPU, all of them or none.
static std::int64_t tiles_of_a_block(std::int64_t positions, std::int64_t tiles) {
  const std::int64_t room = multiprocessors() * device::kPoolBlocks;
  std::int64_t best = 1, least = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t each = 1; each <= 8; ++each) {
    const std::int64_t blocks = positions * ((tiles + each - 1) / each);
    const std::int64_t time = (blocks + room - 1) / room * (4 * each + 1);
    if (time < least) best = each, least = time;
  }
  return best;
}

static void log_pool(const LogPoolInputs& in, const LogPoolOptions& options,
                     const LogPoolResults& out, const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab, true);
  const std::int64_t tiles = tiles_of(shape);
  const std::int64_t each = tiles_of_a_block(shape.positions, tiles);
  device::PoolMemory memory{};
  memory.parts = static_cast<device::RowPart*>(queue.workspace);
  memory.tiles = reinterpret_cast<device::PoolTile*>(memory.parts + cut.parts());
  memory.counters =
      reinterpret_cast<unsigned*>(memory.tiles + shape.positions * tiles * device::kPoolWarps);
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    launch_row_parts<kDtype>(queue, in.private_logits, in.public_logits, cut,
                             device::PoolLook<kDtype>{memory.counters}, memory.parts);
    launch(queue, device::pool_sums_kernel<kDtype>,
           grid_of(shape.positions * ((tiles + each - 1) / each)), dim3(device::kPoolThreads),
           device::pool_shared_bytes<kDtype>(), in, device::PoolGrid(options), options, cut, memory,
           static_cast<int>(tiles), static_cast<int>(each), out);
  });
}

void add_log_pool(Table& table) {
  table.log_pool = log_pool;
  table.log_pool_workspace = log_pool_workspace;
}

}  // namespace adapmixed::cuda
