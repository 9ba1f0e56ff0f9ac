#include "cuda/screen.cuh"

#include <algorithm>

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

std::int64_t screen_workspace(const Shape& shape, std::int64_t top_k) {
  const std::int64_t size = core::sort_size(std::min(top_k, shape.vocab));
  return size <= core::kMostShared ? 0 : shape.positions * core::bytes_kept(size);
}

void screen(const Ensemble& in, const ScreenOptions& options, double* divergence, bool* passed,
            const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t size = core::sort_size(std::min(options.top_k, in.shape.vocab));
  const bool shared = size <= core::kMostShared;
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    launch(queue, core::screen_kernel<decltype(dtype)::value>, grid_of(in.shape.positions),
           dim3(core::kScreenThreads),
           shared ? static_cast<std::size_t>(core::bytes_kept(size)) : 0, in, options, size,
           static_cast<char*>(queue.workspace), divergence, passed);
  });
}

}  // namespace adapmixed::cuda
