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
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, ADAPMIXED_ISA::project_kernel<decltype(dtype)::value>,
           dim3(static_cast<unsigned>(in.shape.models * in.shape.positions)),
           dim3(static_cast<unsigned>(threads)), 0, in, order, radius, out);
  });
}

}  // namespace adapmixed::cuda
