#include "common/log_sum_exp.cuh"

#include "common/launch.cuh"

namespace adapmixed::cuda {

void log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                 std::int64_t vocab, double* lse, std::int32_t* status, const Queue& queue) {
  const DeviceGuard guard(queue);
  with_dtype(logits.dtype, [&](auto dtype) {
    launch(queue, ADAPMIXED_ISA::log_sum_exp_kernel<decltype(dtype)::value>,
           grid_of(models * positions), dim3(256), 0, logits, positions, vocab, lse, status);
  });
}

}  // namespace adapmixed::cuda
