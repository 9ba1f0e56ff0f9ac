#include "cuda/clip_project.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

void clip_project(const ProjectInputs& in, const ClipOptions& options, const ClipResults& out,
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
  // Whole warps, and no more of them than there are tokens for.
  constexpr std::int64_t kWarp = device::kWarp, kMost = device::kClipThreads;
  const std::int64_t warps = (in.shape.vocab + kWarp - 1) / kWarp;
  const std::int64_t threads = warps * kWarp < kMost ? warps * kWarp : kMost;
  const dim3 grid = grid_of(in.shape.models * in.shape.positions);
  const dim3 block(static_cast<unsigned>(threads));
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, device::clip_project_kernel<decltype(dtype)::value>, grid, block, 0, call);
  });
}

}  // namespace adapmixed::cuda
