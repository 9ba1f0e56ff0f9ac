#include "cuda/mixture.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

void mixture(const Ensemble& in, const Weights& weights, double* probabilities,
             const Queue& queue) {
  const DeviceGuard guard(queue);
  const dim3 threads(device::kMixtureThreads);
  const std::int64_t blocks_a_row =
      (in.shape.vocab + device::kMixtureThreads - 1) / device::kMixtureThreads;
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, device::mixture_kernel<decltype(dtype)::value>,
           grid_of(in.shape.positions * blocks_a_row), threads, 0, in, weights, blocks_a_row,
           probabilities);
  });
  launch(queue, device::check_mixture_kernel, grid_of(in.shape.positions), threads, 0,
         in.shape.vocab, probabilities);
}

}  // namespace adapmixed::cuda
