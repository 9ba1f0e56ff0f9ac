#include "planted.h"

#include "common/block.cuh"
#include "common/launch.cuh"

namespace planted {
namespace {

enum class Fault { nothing, workspace, dynamic, in_static, atomic, copy };

struct Many {
  double values[40];
};

// The values are not used: they are multiplied by 0.
template <int>
__global__ void kernel(Fault fault, double* workspace) {
  __shared__ double fixed[2];
  __shared__ unsigned count;
  __shared__ Many many;
  double* dynamic = adapmixed::ADAPMIXED_ISA::dynamic_shared<double>();
  const unsigned t = threadIdx.x;
  if (t == 1 && fault != Fault::workspace) workspace[1] = 1.0;
  if (t == 0 || fault != Fault::dynamic) dynamic[t] = 1.0;
  if (t == 0 || fault != Fault::in_static) fixed[t] = 1.0;
  if (t == 0 && fault != Fault::atomic) count = 0;
  if (t == 0 && fault != Fault::copy) many = {};
  __syncthreads();
  atomicAdd(&count, 1u);
  if (t != 1) return;
  const Many copied = many;
  workspace[0] += 0.0 * (workspace[1] + dynamic[1] + fixed[1] + copied.values[t + 5]);
}

}  // namespace

void read_unwritten(const std::string& where, double* workspace) {
  const Fault fault = where == "workspace" ? Fault::workspace
                      : where == "dynamic" ? Fault::dynamic
                      : where == "static"  ? Fault::in_static
                      : where == "atomic"  ? Fault::atomic
                      : where == "copy"    ? Fault::copy
                                           : Fault::nothing;
  cudaMemsetAsync(workspace, 0, 8, nullptr);
  adapmixed::cuda::launch({}, kernel<0>, dim3(1), dim3(2), 16, fault, workspace);
}

}  // namespace planted
