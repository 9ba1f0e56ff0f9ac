#include "cuda/project.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             const Queue& queue) {
  const DeviceGuard guard(queue);
  // Whole warps, and no more of them than there are tokens for.
  constexpr std::int64_t kWarp = ADAPMIXED_ISA::kWarp, kMost = ADAPMIXED_ISA::kProjectThreads;
  const std::int64_t warps = (in.shape.vocab + kWarp - 1) / kWarp;
  const std::int64_t threads = warps * kWarp < kMost ? warps * kWarp : kMost;
  const dim3 grid = grid_of(in.shape.models * in.shape.positions);
  const dim3 block(static_cast<unsigned>(threads));
  const bool lists = ADAPMIXED_ISA::make_target(order, radius, 0.0).scaled;
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const auto kernel = lists ? ADAPMIXED_ISA::project_kernel<kDtype, true>
                              : ADAPMIXED_ISA::project_kernel<kDtype, false>;
    launch(queue, kernel, grid, block, 0, in, order, radius, out);
  });
}

}  // namespace adapmixed::cuda
