// How far the GPU's approximations ex2, lg2 and rcp are from the truth, over all 2^32 floats.
//
//   nvcc -O3 -std=c++17 -arch=native benchmarks/mufu.cu -o mufu && ./mufu
//
// Errors are those of the instructions alone, against functions in double. They are sorted by the
// exponent of what matters: of |x| (ex2, rcp) or of |x - 1| (lg2 between 0.5 and 2). Above and below
// are the largest errors of either sign, in units of 2^-24: relative, but of lg2 between 0.5 and 2
// absolute. `falls` counts neighbours x < y with f(x) > f(y), the other way round for rcp.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr int kBins = 256;  // the exponents of floats
constexpr double kUnit = 0x1p24;

struct Worst {
  unsigned long long above[kBins], below[kBins], falls[kBins], bad[kBins];
};

struct Ex2 {
  static constexpr const char* kName = "ex2: x in [-126, 128), by the exponent of |x|";
  __device__ static float fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static double exact(float x) { return exp2(static_cast<double>(x)); }
  __device__ static bool inside(float x) { return -126 <= x && x < 128; }
  // What it must give elsewhere; subnormals count as zeros.
  __device__ static bool good(float x, float y) {
    if (isnan(x)) return isnan(y);
    return x < -126 ? y >= 0 && y <= 0x1p-126f : y == HUGE_VALF;
  }
  __device__ static bool absolute(float) { return false; }
  __device__ static float key(float x) { return x; }
  static constexpr bool kRises = true;
};

struct Lg2 {
  static constexpr const char* kName =
      "lg2: normal x, by the exponent of |x - 1| in [0.5, 2], else of |x| in a row of its own";
  __device__ static float fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static double exact(float x) { return log2(static_cast<double>(x)); }
  __device__ static bool inside(float x) { return 0x1p-126f <= x && x < HUGE_VALF; }
  __device__ static bool good(float x, float y) {
    if (isnan(x)) return isnan(y);
    if (fabsf(x) < 0x1p-126f) return y == -HUGE_VALF;
    return x < 0 ? isnan(y) : y == HUGE_VALF;
  }
  __device__ static bool absolute(float x) { return 0.5f <= x && x <= 2.0f; }
  __device__ static float key(float x) { return absolute(x) ? x - 1 : 0x1p100f; }
  static constexpr bool kRises = true;
};

struct Rcp {
  static constexpr const char* kName = "rcp: 2^-126 <= |x| <= 2^126, by the exponent of |x|";
  __device__ static float fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static double exact(float x) { return 1 / static_cast<double>(x); }
  __device__ static bool inside(float x) { return 0x1p-126f <= fabsf(x) && fabsf(x) <= 0x1p126f; }
  __device__ static bool good(float x, float y) {
    if (isnan(x)) return isnan(y);
    return fabsf(x) < 1 ? isinf(y) : fabsf(y) <= 0x1p-126f;
  }
  __device__ static bool absolute(float) { return false; }
  __device__ static float key(float x) { return x; }
  static constexpr bool kRises = false;
};

__device__ int bin_of(float key) { return static_cast<int>(__float_as_uint(key) >> 23 & 0xff); }

// Non-negative doubles are ordered as their bits are.
__device__ void raise(unsigned long long* place, double value) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
  if (bits > *place) atomicMax(place, bits);
}

template <class F>
__global__ void sweep(Worst* worst) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 32; i += stride) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(i)), y = F::fast(x);
    const int bin = bin_of(F::inside(x) ? F::key(x) : x);
    if (!F::inside(x)) {
      if (!F::good(x, y)) atomicAdd(&worst->bad[bin], 1ull);
      continue;
    }
    const double truth = F::exact(x);
    double error = static_cast<double>(y) - truth;
    if (!F::absolute(x)) error /= fabs(truth);
    if (!(fabs(error) < 1)) {
      atomicAdd(&worst->bad[bin], 1ull);
    } else {
      raise(error > 0 ? &worst->above[bin] : &worst->below[bin], fabs(error) * kUnit);
    }
    const float next = nextafterf(x, HUGE_VALF);
    if (F::inside(next)) {
      const float other = F::fast(next);
      if (F::kRises ? other < y : other > y) atomicAdd(&worst->falls[bin], 1ull);
    }
  }
}

template <class F>
void print(Worst* on_device) {
  static Worst worst;
  cudaMemset(on_device, 0, sizeof worst);
  sweep<F><<<4096, 256>>>(on_device);
  const cudaError_t error = cudaMemcpy(&worst, on_device, sizeof worst, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
  std::printf("%s\n%10s%12s%12s%12s%8s\n", F::kName, "exponent", "above", "below", "falls", "bad");
  double above = 0, below = 0;
  unsigned long long falls = 0, bad = 0;
  for (int bin = 0; bin < kBins; ++bin) {
    double up, down;
    std::memcpy(&up, &worst.above[bin], sizeof up);
    std::memcpy(&down, &worst.below[bin], sizeof down);
    above = std::fmax(above, up), below = std::fmax(below, down);
    falls += worst.falls[bin], bad += worst.bad[bin];
    const bool shown = bin >= 100 && bin <= 136;
    if ((up > 0 || down > 0 || worst.falls[bin]) && (shown || bin == 227)) {
      std::printf("%10d%12.5f%12.5f%12llu%8llu\n", bin - 127, up, down, worst.falls[bin],
                  worst.bad[bin]);
    }
  }
  std::printf("%10s%12.5f%12.5f%12llu%8llu\n\n", "all", above, below, falls, bad);
}

int main() {
  cudaDeviceProp about;
  cudaGetDeviceProperties(&about, 0);
  std::printf("%s, CUDA %d\n\n", about.name, CUDART_VERSION);
  Worst* worst;
  if (cudaMalloc(&worst, sizeof *worst) != cudaSuccess) return 1;
  print<Ex2>(worst);
  print<Lg2>(worst);
  print<Rcp>(worst);
}
