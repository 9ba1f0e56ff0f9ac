#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "leave_one_out/cuda_finish.cuh"
#include "leave_one_out/cuda_float_finish.cuh"
#include "leave_one_out/cuda_float_models.cuh"
#include "leave_one_out/cuda_float_tile.cuh"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

namespace {

// A call with its layouts. The positions of a group also share 64 MiB for the sums in floats.
device::LossCall divided(const Shape& shape, std::int64_t num_orders) {
  device::LossCall call{};
  call.layout = device::double_layout(shape, num_orders);
  call.floats = device::FloatLayout(shape);
  const std::int64_t words = device::ModelTotals::words(shape.models, num_orders);
  call.layout.group =
      std::min(call.layout.group, std::max<std::int64_t>(device::kLossMemory / words, 1));
  return call;
}
// Words behind the rest of the workspace that are 0 at first.
std::int64_t progress_bytes(const device::LossCall& call) {
  return static_cast<std::int64_t>(sizeof(device::LossProgress)) +
         call.layout.group * static_cast<std::int64_t>(sizeof(device::LossState));
}
// Places the arrays of a call in its workspace, and returns the bytes that it takes.
std::int64_t place(device::LossCall& call, const Shape& shape, std::int64_t orders,
                   void* workspace) {
  std::int64_t bytes = 0;
  const auto take = [&](auto*& array, std::int64_t size) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(
        reinterpret_cast<std::uintptr_t>(workspace) + static_cast<std::uintptr_t>(bytes));
    bytes += (size + 15) / 16 * 16;
  };
  const auto size_of = [](auto* array) { return static_cast<std::int64_t>(sizeof *array); };
  const std::int64_t group = call.layout.group, models = shape.models;
  take(call.sums, call.layout.sums_bytes());
  take(call.totals, group * size_of(call.totals));
  take(call.model_totals,
       group * device::ModelTotals::words(models, orders) * size_of(call.model_totals));
  take(call.models, group * models * size_of(call.models));
  take(call.doubles, group * models * size_of(call.doubles));
  take(call.facts, group * device::float_facts_of(models) * size_of(call.facts));
  take(call.progress, progress_bytes(call));
  call.states = reinterpret_cast<device::LossState*>(call.progress + 1);
  return bytes;
}

// Queues the attempt in single precision at `here` positions.
template <Dtype D>
void queue_floats(const device::LossCall& call, const device::PackedFits<kMaxOrders>& fits,
                  std::int64_t here, const Queue& queue) {
  const dim3 threads(device::kFloatThreads);
  const auto shared = static_cast<std::size_t>(call.floats.shared_bytes(call.in.shape.models));
  const dim3 losses = grid_of(here * device::float_finish_blocks(call));
  launch(queue, device::float_models_kernel,
         grid_of(here * device::float_models_blocks(call.in.shape.models, call.orders.count)),
         threads, 0, call);
  launch(queue, device::float_sums_kernel<D>, grid_of(here * call.floats.tiles), threads, shared,
         call);
  if (call.orders.count <= device::kFewOrders) {
    launch(queue, device::float_finish_kernel<device::kFewOrders>, losses, threads, 0, call,
           device::first_of<device::kFewOrders>(fits));
  } else {
    launch(queue, device::float_finish_kernel<kMaxOrders>, losses, threads, 0, call, fits);
  }
}

}  // namespace

std::int64_t leave_one_out_workspace(const Shape& shape, std::int64_t num_orders) {
  device::LossCall call = divided(shape, num_orders);
  return place(call, shape, num_orders, nullptr);
}

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, const Queue& queue) {
  const DeviceGuard guard(queue);
  device::LossCall call = divided(in.shape, options.num_orders);
  place(call, in.shape, options.num_orders, queue.workspace);
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
  for (int k = 0; k < device::kDegrees; ++k) {
    call.reach[k] = device::moment_reach(call.all.largest_order, device::degree_at(k));
    call.a_reach[k] = 1.0 / call.reach[k];
  }
  call.a_slot = 1.0 / call.all.slots;
  call.a_neighbour = 1.0 / (call.all.against_public ? call.all.slots : call.all.slots - 1.0);
  call.after_floats = call.floats.tile > 0 && call.all.slots >= device::kFewSlots &&
                      weights.upper == 0.0 &&
                      most_shared_bytes() >= call.floats.shared_bytes(in.shape.models);
  const auto fits =
      call.after_floats ? device::fits_of(call.orders, call.all.largest_order) : nullptr;
  for (call.first = 0; call.first < in.shape.positions; call.first += call.layout.group) {
    const std::int64_t here = std::min(call.layout.group, in.shape.positions - call.first);
    if (!call.after_floats) {
      clear(queue, reinterpret_cast<unsigned*>(call.progress), progress_bytes(call) / 4);
    }
    const std::int64_t pieces = device::loss_pieces(call, here);
    with_dtype(in.private_logits.dtype, [&](auto dtype) {
      constexpr Dtype kDtype = decltype(dtype)::value;
      if (call.after_floats) queue_floats<kDtype>(call, *fits, here, queue);
      launch(queue, device::double_loss_kernel<kDtype>,
             grid_of(std::min(pieces, device::kMostLossBlocks)), dim3(device::kLossThreads), 0,
             call, here);
    });
  }
}

}  // namespace adapmixed::cuda
