#include "cuda/sample.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
            std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
            std::int64_t* tokens, std::int32_t* status, const Queue& queue) {
  const DeviceGuard guard(queue);
  with_dtype(public_logits.dtype, [&](auto dtype) {
    launch(queue, core::sample_kernel<decltype(dtype)::value>, grid_of(positions),
           dim3(core::kSampleThreads), 0, probabilities, public_logits, vocab, core::key_of(key),
           counter, tokens, status);
  });
}

}  // namespace adapmixed::cuda
