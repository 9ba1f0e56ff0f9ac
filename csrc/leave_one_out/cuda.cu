#include "leave_one_out/cuda_sums.cuh"

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "leave_one_out/cuda_finish.cuh"
#include "leave_one_out/cuda_float_finish.cuh"
#include "leave_one_out/cuda_float_prepare.cuh"
#include "leave_one_out/cuda_float_tile.cuh"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

// The layout of one call in the workspace. The sums come first: the single-precision kernels write
// them, and the double-precision kernels overwrite them.
struct LossWorkspace {
  device::LossLayout layout;
  device::FloatLayout floats;
  std::int64_t group, models, orders;

  LossWorkspace(const Shape& shape, std::int64_t num_orders)
      : layout(shape, num_orders),
        floats(shape, num_orders),
        models(shape.models),
        orders(num_orders) {
    if (floats.group > 0) layout.group = floats.group = std::min(layout.group, floats.group);
    group = layout.group;
  }

  // A multiple of 16, as is the size of the interpolants, so that the models' constants are aligned
  // to 16 bytes.
  std::int64_t sums_bytes() const {
    return (std::max(layout.sums_bytes(), floats.sums_bytes()) + 15) / 16 * 16;
  }
  std::int64_t bytes() const {
    return sums_bytes() + layout.other_bytes() + floats.other_bytes(models, orders);
  }

  static_assert(sizeof(device::ExcessFit) % 16 == 0);

  void place(void* workspace, device::LossCall& call, device::FloatCall& float_call) const {
    char* at = static_cast<char*>(workspace);
    const auto take = [&](auto*& pointer, std::int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += count * static_cast<std::int64_t>(sizeof *pointer);
    };
    call.layout = layout;
    call.sums = reinterpret_cast<double*>(at);
    at += sums_bytes();
    float_call.layout = floats;
    take(float_call.fits, device::kDegrees * orders * 2);
    take(float_call.models, floats.group * models);
    take(float_call.positions, floats.group);
    take(float_call.failed, floats.group);
    take(float_call.done, floats.group);
    take(call.rare_lanes, group * layout.words);
    take(call.foreign, group);
    take(call.overflowed, group);
  }
};

// Queues the attempt in single precision at `here` positions. call.done then marks those that are
// done.
template <Dtype D>
void queue_floats(const device::LossCall& call, const device::FloatCall& floats, std::int64_t here,
                  const Queue& queue) {
  const dim3 positions = grid_of(here), threads(device::kFloatThreads);
  const dim3 chunks = grid_of(here * floats.layout.chunks);
  const std::int64_t blocks = (floats.layout.per_chunk + device::kWarp - 1) / device::kWarp;
  const auto shared = static_cast<std::size_t>(floats.layout.shared_bytes(call.in.shape.models));
  launch(queue, device::float_positions_kernel<D>, positions, dim3(device::kPositionThreads), 0,
         call, floats);
  launch(queue, device::float_sums_kernel<D>, chunks, threads, shared, call, floats);
  launch(queue, device::float_totals_kernel, grid_of(here * blocks), threads, 0, call, floats);
  launch(queue, device::float_loss_kernel, positions, threads, 0, call, floats);
}

}  // namespace

std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  return LossWorkspace(shape, num_orders).bytes();
}

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, const Queue& queue) {
  const DeviceGuard guard(queue);
  const LossWorkspace workspace(in.shape, options.num_orders);
  const device::LossLayout& layout = workspace.layout;
  device::LossCall call{};
  device::FloatCall floats{};
  workspace.place(queue.workspace, call, floats);
  call.in = in;
  call.weights = weights;
  call.all = device::neighbours_of(in.shape, options);
  call.orders.count = static_cast<int>(options.num_orders);
  call.orders.all_integer = true;
  for (int k = 0; k < call.orders.count; ++k) {
    call.orders.value[k] = options.orders[k];
    call.orders.integer[k] = device::integer_order(options.orders[k]);
    call.orders.all_integer = call.orders.all_integer && call.orders.integer[k] != 0;
  }
  call.loss = loss;
  call.balance = balance;
  const bool try_floats = workspace.floats.group > 0 && call.all.slots >= device::kFewSlots &&
                          weights.upper == 0.0 && most_shared_bytes() >= device::kFloatShared;
  call.done = try_floats ? floats.done : nullptr;
  if (try_floats && in.shape.positions > 0) {
    launch(queue, device::float_fits_kernel, grid_of(device::fit_blocks(call.orders.count)),
           dim3(device::kFloatThreads), 0, call, floats);
  }

  const dim3 threads(device::kLossThreads), finish_threads(device::kFinishThreads);
  const std::int64_t finish_blocks =
      (in.shape.models * options.num_orders + device::kFinishThreads - 1) / device::kFinishThreads;
  for (call.first = 0; call.first < in.shape.positions; call.first += layout.group) {
    const std::int64_t left = in.shape.positions - call.first;
    const std::int64_t here = left < layout.group ? left : layout.group;
    const dim3 chunks = grid_of(here * layout.chunks);
    const dim3 losses = grid_of(here * finish_blocks);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      if (try_floats) queue_floats<decltype(dtype)::value>(call, floats, here, queue);
      launch(queue, device::loss_sums_kernel<decltype(dtype)::value>, chunks, threads, 0, call);
    });
    launch(queue, device::rare_sums_kernel, chunks, threads, 0, call);
    launch(queue, device::loss_balance_kernel, grid_of(here), threads, 0, call);
    launch(queue, device::loss_kernel, losses, finish_threads, 0, call);
    launch(queue, device::log_sums_kernel, chunks, threads, 0, call);
    launch(queue, device::log_loss_kernel, losses, finish_threads, 0, call);
  }
}

}  // namespace adapmixed::cuda
