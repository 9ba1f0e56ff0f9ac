// p_bar_i = clip(s p_i, c q, C q) of every row, and its charges. log_sum_exp reads all private rows
// first. Then one block takes one row. Its threads search for log s together: each sums its own
// tokens, and all see the same sums.
#include "clip/charge.h"
#include "clip/formula.h"
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/row_pair.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kClipThreads = 256;

// The options by value, because the orders of ClipOptions are in host memory.
struct ClipCall {
  ClipInputs in;
  ClipResults out;  // private_lse and status as log_sum_exp left them
  double lower, upper;
  std::int64_t num_models;
  int num_orders;
  bool far;  // compute charges by logarithms
  double orders[kMaxOrders];
};

// The parameters of one row's p_bar.
struct Clip {
  double log_scale, residual;  // log s, and p_bar / q where p = 0
};

// A whole block must call each member together.
template <Dtype D>
class BlockClip {
 public:
  __device__ BlockClip(const RowPair<D>& pair, const ClipCall& call) : pair_(pair), call_(call) {}

  __device__ Clip solve() {
    double q_of[2] = {0.0, 0.0};  // q of the tokens with p > 0, and of the others
    pair_.for_each([&](double log_q, double t) {
      const double q = in_public(log_q) ? exp_(log_q) : 0.0;
      q_of[0] += t >= kClipAbsent ? q : 0.0;
      q_of[1] += t >= kClipAbsent ? 0.0 : q;
    });
    block_sum(q_of);
    if (clip_covers_too_little(call_.lower, call_.upper, q_of[0], q_of[1])) {
      return {HUGE_VAL, clip_residual(call_.lower, call_.upper, q_of[0], q_of[1])};
    }
    missing_ = 1.0 - (q_of[0] + q_of[1]);
    double log_scale = 0.0;
    solve_clip_scale([&](double at) { return sums(at); }, call_.lower, HUGE_VAL, &log_scale);
    return {log_scale, call_.lower};
  }

  __device__ double charge(const Clip& clip, double order) const {
    const ChargeScale scale(call_.lower, call_.upper, call_.num_models);
    double both[2];
    if (call_.far) {
      both[0] = both[1] = -HUGE_VAL;
      pair_.for_each([&](double log_q, double t) {
        if (log_q == -HUGE_VAL) return;
        const double ratio =
            log_clipped_ratio(t, clip.log_scale, clip.residual, call_.lower, call_.upper);
        scale.add_log(log_q, ratio, order, both[0], both[1]);
      });
      block_reduce(both, LogAdd{});
      return scale.of_logs(both[0], both[1], order);
    }
    both[0] = both[1] = 0.0;
    pair_.for_each([&](double log_q, double t) {
      if (!in_public(log_q)) return;
      const double q = exp_(log_q);
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
  // Whether q is a double above 0.
  __device__ static bool in_public(double log_q) { return log_q > -708.0; }

  __device__ ClipSums sums(double log_scale) const {
    double values[2] = {0.0, 0.0};
    pair_.for_each([&](double log_q, double t) {
      if (!in_public(log_q)) return;
      const double q = exp_(log_q), low = call_.lower * q, high = call_.upper * q;
      const double x = t >= kClipAbsent ? q * exp_(t + log_scale) : 0.0;
      values[0] += vmin(high, vmax(low, x));
      if (x > low && x < high) values[1] += x;
    });
    block_sum(values);
    return {values[0] + missing_, values[1]};
  }

  const RowPair<D>& pair_;
  const ClipCall& call_;
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

template <Dtype D>
__global__ void __launch_bounds__(kClipThreads, 1)
    clip_project_kernel(const __grid_constant__ ClipCall call) {
  const std::int64_t at = blockIdx.x, positions = call.in.shape.positions;
  const std::int64_t model = at / positions, position = at % positions;
  const double public_lse = call.in.public_lse[position], lse = call.out.private_lse[at];
  const bool public_ok = std::isfinite(public_lse);
  const bool good = public_ok && call.out.status[at] == kRowOk;
  const RowPair<D> pair{row_bits<D>(call.in.private_logits, model, position),
                        row_bits<D>(call.in.public_logits, 0, position), call.in.shape.vocab,
                        public_lse, lse - public_lse};
  BlockClip<D> block(pair, call);
  const bool same = good && same_rows(pair);
  // Then p_bar = q, and nothing is charged.
  const bool unmoved = same || call.lower == 1.0 || call.upper == 1.0;
  Clip clip{0.0, same ? call.lower : 1.0};
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

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

void clip_project(const ClipInputs& in, const ClipOptions& options, const ClipResults& out,
                  const Queue& queue) {
  const DeviceGuard guard(queue);
  device::ClipCall call{};
  call.in = in;
  call.out = out;
  call.lower = options.lower;
  call.upper = options.upper;
  call.num_models = options.num_models;
  call.num_orders = static_cast<int>(options.num_orders);
  double largest = 1.0;
  for (int k = 0; k < call.num_orders; ++k) {
    call.orders[k] = options.orders[k];
    largest = largest < options.orders[k] ? options.orders[k] : largest;
  }
  call.far = device::ChargeScale(options.lower, options.upper, options.num_models).far(largest);
  const dim3 grid = grid_of(in.shape.models * in.shape.positions);
  const dim3 block = block_of(in.shape.vocab, device::kClipThreads);
  log_sum_exp(in.private_logits, in.shape.models, in.shape.positions, in.shape.vocab,
              out.private_lse, out.status, queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, device::clip_project_kernel<decltype(dtype)::value>, grid, block, 0, call);
  });
}

}  // namespace adapmixed::cuda
