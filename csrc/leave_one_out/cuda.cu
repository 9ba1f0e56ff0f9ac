#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "leave_one_out/cuda_finish.cuh"
#include "leave_one_out/cuda_float_finish.cuh"
#include "leave_one_out/cuda_float_tile.cuh"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

// The layout of one call in the workspace. The double-precision kernel writes its sums over those
// of the single-precision kernels, which are done by then.
struct LossWorkspace {
  device::LossLayout layout;
  device::FloatLayout floats;

  LossWorkspace(const Shape& shape, std::int64_t num_orders)
      : layout(device::double_layout(shape, num_orders)), floats(shape, num_orders) {
    if (floats.group > 0) layout.group = floats.group = std::min(layout.group, floats.group);
  }

  std::int64_t sums_bytes() const { return std::max(layout.sums_bytes(), floats.sums_bytes()); }
  // Words that are 0 at first.
  std::int64_t progress_bytes() const {
    return static_cast<std::int64_t>(sizeof(device::LossProgress)) +
           layout.group * static_cast<std::int64_t>(sizeof(device::LossState));
  }
  std::int64_t bytes() const {
    return sums_bytes() + progress_bytes() +
           floats.group * static_cast<std::int64_t>(sizeof(device::FloatPosition));
  }

  void place(void* workspace, device::LossCall& call, device::FloatCall& float_call) const {
    char* at = static_cast<char*>(workspace);
    const auto take = [&](auto*& pointer, std::int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += count * static_cast<std::int64_t>(sizeof *pointer);
    };
    call.layout = layout;
    float_call.layout = floats;
    call.sums = reinterpret_cast<double*>(at);
    at += sums_bytes();
    take(float_call.positions, floats.group);
    take(call.progress, 1);
    take(call.states, layout.group);
  }
};

// Queues the attempt in single precision at `here` positions.
template <Dtype D>
void queue_floats(const device::LossCall& call, const device::FloatCall& floats,
                  const device::PackedFits<kMaxOrders>& fits, std::int64_t here,
                  const Queue& queue) {
  const dim3 threads(device::kFloatThreads);
  const auto shared = static_cast<std::size_t>(floats.layout.shared_bytes(call.in.shape.models));
  const dim3 totals =
      grid_of(here * ((floats.layout.per_chunk + device::kWarp - 1) / device::kWarp));
  launch(queue, device::float_sums_kernel<D>, grid_of(here * floats.layout.chunks), threads, shared,
         call, floats);
  if (call.orders.count <= device::kFewOrders) {
    launch(queue, device::float_finish_kernel<device::kFewOrders>, totals, threads, 0, call, floats,
           device::first_of<device::kFewOrders>(fits));
  } else {
    launch(queue, device::float_finish_kernel<kMaxOrders>, totals, threads, 0, call, floats, fits);
  }
}

}  // namespace

std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  return LossWorkspace(shape, num_orders).bytes();
}

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, const Queue& queue) {
  const DeviceGuard guard(queue);
  const LossWorkspace workspace(in.shape, options.num_orders);
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
  call.after_floats = workspace.floats.group > 0 && call.all.slots >= device::kFewSlots &&
                      weights.upper == 0.0 && most_shared_bytes() >= device::kFloatShared;
  const auto fits =
      call.after_floats ? device::fits_of(call.orders, call.all.largest_order) : nullptr;
  for (call.first = 0; call.first < in.shape.positions; call.first += call.layout.group) {
    const std::int64_t here = std::min(call.layout.group, in.shape.positions - call.first);
    clear(queue, reinterpret_cast<unsigned*>(call.progress), workspace.progress_bytes() / 4);
    const std::int64_t pieces = device::loss_pieces(call, here);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      constexpr Dtype kDtype = decltype(dtype)::value;
      if (call.after_floats) queue_floats<kDtype>(call, floats, *fits, here, queue);
      launch(queue, device::double_loss_kernel<kDtype>,
             grid_of(std::min(pieces, device::kMostLossBlocks)), dim3(device::kLossThreads), 0,
             call, here);
    });
  }
}

}  // namespace adapmixed::cuda
