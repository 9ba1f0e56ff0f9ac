#include "cuda/leave_one_out.cuh"

#include "cuda/launch.h"
#include "cuda/loss_finish.cuh"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  return device::LossLayout(shape, num_orders).bytes();
}

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, const Queue& queue) {
  const DeviceGuard guard(queue);
  const device::LossLayout layout(in.shape, options.num_orders);
  device::LossCall call{};
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
  call.layout = layout;
  call.sums = static_cast<double*>(queue.workspace);
  double* sums_end = call.sums + layout.group * layout.chunks * layout.per_chunk;
  call.rare_lanes = reinterpret_cast<std::uint32_t*>(sums_end);
  call.foreign = reinterpret_cast<std::int32_t*>(call.rare_lanes + layout.group * layout.words);
  call.overflowed = call.foreign + layout.group;
  call.loss = loss;
  call.balance = balance;

  const dim3 threads(device::kLossThreads), finish_threads(device::kFinishThreads);
  const std::int64_t finish_blocks =
      (in.shape.models * options.num_orders + device::kFinishThreads - 1) / device::kFinishThreads;
  for (call.first = 0; call.first < in.shape.positions; call.first += layout.group) {
    const std::int64_t left = in.shape.positions - call.first;
    const std::int64_t here = left < layout.group ? left : layout.group;
    const dim3 chunks(static_cast<unsigned>(here * layout.chunks));
    const dim3 losses(static_cast<unsigned>(here * finish_blocks));
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      launch(queue, device::loss_sums_kernel<decltype(dtype)::value>, chunks, threads, 0, call);
    });
    launch(queue, device::rare_sums_kernel, chunks, threads, 0, call);
    launch(queue, device::loss_balance_kernel, dim3(static_cast<unsigned>(here)), threads, 0, call);
    launch(queue, device::loss_kernel, losses, finish_threads, 0, call);
    launch(queue, device::log_sums_kernel, chunks, threads, 0, call);
    launch(queue, device::log_loss_kernel, losses, finish_threads, 0, call);
  }
}

}  // namespace adapmixed::cuda
