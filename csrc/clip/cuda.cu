// p_bar_i = clip(s p_i, c q, C q) of every row, and its charges. log_sum_exp reads all private rows
// first. Then blocks take rows in turn. The threads of one search for log s together: each sums its
// own tokens, of which it keeps p, and all see the same sums.
#include "clip/formula.h"
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kClipThreads = 512;
// About as many as there are multiprocessors. What they keep fits the L2 cache of today's GPUs.
constexpr std::int64_t kClipBlocks = 132;

// The options by value, because the orders of ClipOptions are in host memory.
struct ClipCall {
  ClipInputs in;
  ClipResults out;  // private_lse and status as log_sum_exp left them
  double* q;        // (B, V)
  double* kept;     // (blocks, V), p of the row that a block has; each thread has its own tokens
  double lower, upper;
  std::int64_t num_models;
  int num_orders;
  double orders[kMaxOrders];
};

// One private row and its public row, read by a block.
template <Dtype D>
struct RowPair {
  const typename Bits<D>::type *private_row, *public_row;
  std::int64_t vocab;
  double lse, public_lse;

  // Calls visit(v, t) for every token of this thread, t = log p/q, -inf if p counts as 0. A token
  // that the public row masks has t = +inf if the private row has it.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
      const double z = logit<D>(private_row, v), z0 = logit<D>(public_row, v);
      visit(v, z < least_clipped(lse) ? -HUGE_VAL : (z - lse) - (z0 - public_lse));
    }
  }
};

// The parameters of one row's p_bar.
struct Clip {
  double log_scale, residual;  // log s, and p_bar / q where p = 0
};

// A whole block must call each member together.
template <Dtype D>
class BlockClip {
 public:
  __device__ BlockClip(const RowPair<D>& pair, const ClipCall& call, std::int64_t position)
      : pair_(pair),
        call_(call),
        q_(call.q + position * pair.vocab),
        kept_(call.kept + blockIdx.x * pair.vocab) {}

  __device__ Clip solve() {
    double q_of[2] = {0.0, 0.0};  // q of the tokens with p > 0, and of the others
    pair_.for_each([&](std::int64_t v, double t) {
      const double q = q_[v];
      const bool has = t > -HUGE_VAL;
      q_of[0] += has ? q : 0.0;
      q_of[1] += has ? 0.0 : q;
      kept_[v] = has && q > 0.0 ? q * exp_(t) : 0.0;
    });
    block_sum(q_of);
    if (clip_covers_too_little(call_.lower, call_.upper, q_of[0], q_of[1])) {
      return {HUGE_VAL, clip_residual(call_.lower, call_.upper, q_of[0], q_of[1])};
    }
    missing_ = 1.0 - (q_of[0] + q_of[1]);
    double log_scale = 0.0;
    const auto of_kept = [&](double at) { return kept_sums(at); };
    solve_clip_scale(of_kept, call_.lower, kMostScale, &log_scale);
    return {log_scale, call_.lower};
  }

  __device__ double charge(const Clip& clip, double order) const {
    const ChargeScale scale(call_.lower, call_.num_models);
    double both[2] = {0.0, 0.0};
    pair_.for_each([&](std::int64_t v, double t) {
      const double q = q_[v];
      if (q == 0.0) return;
      const Projected<double> own =
          clipped(t, clip.log_scale, clip.residual, call_.lower, call_.upper);
      const double y = own.excess / scale.slots;
      const LogParts<double> log = log_parts(y, (own.ratio + scale.others) / scale.slots);
      both[0] = vfma(q, power(y, log, order).excess, both[0]);
      both[1] = vfma(q, power(y, log, 1.0 - order).excess, both[1]);
    });
    block_sum(both);
    return scale.of(both[0], both[1], order);
  }

 private:
  __device__ void add(double q, double x, double (&values)[2]) const {
    const double low = call_.lower * q, high = call_.upper * q;
    values[0] += vmin(high, vmax(low, x));
    if (x > low && x < high) values[1] += x;
  }

  __device__ ClipSums kept_sums(double log_scale) const {
    const double scale = exp_(log_scale);
    double values[2] = {0.0, 0.0};
#pragma unroll 4
    for (std::int64_t v = threadIdx.x; v < pair_.vocab; v += blockDim.x) {
      add(q_[v], scale * kept_[v], values);
    }
    block_sum(values);
    return {values[0] + missing_, values[1]};
  }

  const RowPair<D>& pair_;
  const ClipCall& call_;
  const double* q_;
  double* kept_;
  double missing_ = 0.0;  // 1 - sum q; not an error of s, see clip/cpu_row.h
};

// Returns whether the row equals the public row. A whole block must call this together.
template <Dtype D>
__device__ bool same_rows(const RowPair<D>& pair) {
  double differs = 0.0;
  for (std::int64_t v = threadIdx.x; v < pair.vocab; v += blockDim.x) {
    if (pair.private_row[v] != pair.public_row[v]) differs = 1.0;
  }
  return block_max(differs) == 0.0;
}

// q of every token; 0 if the token is masked.
template <Dtype D>
__global__ void __launch_bounds__(kClipThreads)
    clip_public_kernel(const __grid_constant__ ClipCall call) {
  const std::int64_t vocab = call.in.shape.vocab;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= call.in.shape.positions * vocab) return;
  const std::int64_t position = at / vocab;
  const double z0 = logit<D>(row_bits<D>(call.in.public_logits, 0, position), at % vocab);
  const double log_q = z0 - call.in.public_lse[position];
  call.q[at] = z0 == -HUGE_VAL ? 0.0 : exp_(vmax(kRarestClipped, log_q));
}

template <Dtype D>
__device__ void clip_row(const ClipCall& call, std::int64_t at) {
  const std::int64_t positions = call.in.shape.positions;
  const std::int64_t model = at / positions, position = at % positions;
  const double public_lse = call.in.public_lse[position], lse = call.out.private_lse[at];
  const bool public_ok = std::isfinite(public_lse);
  const bool good = public_ok && call.out.status[at] == kRowOk;
  const RowPair<D> pair{row_bits<D>(call.in.private_logits, model, position),
                        row_bits<D>(call.in.public_logits, 0, position), call.in.shape.vocab, lse,
                        public_lse};
  BlockClip<D> block(pair, call, position);
  const bool same = good && same_rows(pair);
  // Then p_bar = q, and nothing is charged.
  const bool unmoved = same || call.lower == 1.0 || call.upper == 1.0;
  Clip clip{0.0, 1.0};
  if (good && !unmoved) clip = block.solve();
  for (int k = 0; k < call.num_orders; ++k) {
    double charge = good ? 0.0 : HUGE_VAL;
    if (good && !unmoved) charge = block.charge(clip, call.orders[k]);
    if (threadIdx.x == 0) call.out.charge[at * call.num_orders + k] = charge;
  }
  if (threadIdx.x != 0) return;
  call.out.log_scale[at] = clip.log_scale;
  call.out.residual[at] = clip.residual;
  if (same) call.out.private_lse[at] = public_lse;  // exactly, so that p/q is 1
  if (!public_ok) call.out.status[at] = kRowPublic;
}

template <Dtype D>
__global__ void __launch_bounds__(kClipThreads, 1)
    clip_project_kernel(const __grid_constant__ ClipCall call) {
  const std::int64_t rows = call.in.shape.models * call.in.shape.positions;
  for (std::int64_t at = blockIdx.x; at < rows; at += gridDim.x) clip_row<D>(call, at);
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static std::int64_t clip_blocks(const Shape& shape) {
  return std::min(shape.models * shape.positions, simulated_or(device::kClipBlocks, 3));
}

// log_sum_exp's memory, and then q and the kept p.
static std::int64_t clip_project_workspace(const Shape& shape) {
  const std::int64_t kept = (shape.positions + clip_blocks(shape)) * shape.vocab;
  return std::max(table().log_sum_exp_workspace(shape),
                  kept * static_cast<std::int64_t>(sizeof(double)));
}

static void clip_project(const ClipInputs& in, const ClipOptions& options, const ClipResults& out,
                         const Queue& queue) {
  const DeviceGuard guard(queue);
  device::ClipCall call{};
  call.in = in;
  call.out = out;
  call.lower = options.lower;
  call.upper = options.upper;
  call.num_models = options.num_models;
  call.num_orders = static_cast<int>(options.num_orders);
  for (int k = 0; k < call.num_orders; ++k) call.orders[k] = options.orders[k];
  const std::int64_t all = in.shape.positions * in.shape.vocab;
  call.q = static_cast<double*>(queue.workspace);
  call.kept = call.q + all;
  const dim3 block = block_of(in.shape.vocab, device::kClipThreads);
  table().log_sum_exp(in.private_logits, in.shape.models, in.shape.positions, in.shape.vocab,
                      out.private_lse, out.status, queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    constexpr Dtype D = decltype(dtype)::value;
    launch(queue, device::clip_public_kernel<D>, grid_of((all + block.x - 1) / block.x), block, 0,
           call);
    launch(queue, device::clip_project_kernel<D>, grid_of(clip_blocks(in.shape)), block, 0, call);
  });
}

void add_clip_project(Table& table) {
  table.clip_project = clip_project;
  table.clip_project_workspace = clip_project_workspace;
}

}  // namespace adapmixed::cuda
