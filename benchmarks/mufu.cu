// How far the GPU's approximations ex2, lg2 and rcp are from the truth, over all 2^32 floats.
//
//   nvcc -O3 -std=c++17 -arch=native benchmarks/mufu.cu -o mufu && ./mufu
//
// Errors are relative, but of lg2 in [0.5, 2] absolute, in units of 2^-24. They are sorted by the
// exponent of |x| (ex2, rcp) or of |x - 1| (lg2 in [0.5, 2]; the rest is in row 100). `falls`
// counts neighbours of which the larger float has the result that belongs to the smaller one, and
// `bad` results that are no approximation, or wrong for infinities, NaN or subnormals.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

enum Function { kEx2, kLg2, kRcp };
constexpr int kBins = 256;  // the exponents of floats

struct Worst {
  unsigned long long above[kBins], below[kBins], falls[kBins], bad[kBins];
};

template <Function F>
__device__ float fast(float x) {
  float y;
  if constexpr (F == kEx2) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  if constexpr (F == kLg2) asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  if constexpr (F == kRcp) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <Function F>
__device__ double exact(double x) {
  return F == kEx2 ? exp2(x) : F == kLg2 ? log2(x) : 1 / x;
}

// Whether the result is a normal number that approximates the truth.
template <Function F>
__device__ bool inside(float x) {
  if (F == kEx2) return -126 <= x && x < 128;
  if (F == kLg2) return 0x1p-126f <= x && x < HUGE_VALF;
  return 0x1p-126f <= fabsf(x) && fabsf(x) <= 0x1p126f;
}

// What the result must be elsewhere; subnormal numbers count as zeros.
template <Function F>
__device__ bool good(float x, float y) {
  if (isnan(x)) return isnan(y);
  if (F == kEx2) return x < -126 ? y >= 0 && y <= 0x1p-126f : y == HUGE_VALF;
  if (F == kRcp) return fabsf(x) < 1 ? isinf(y) : fabsf(y) <= 0x1p-126f;
  return fabsf(x) < 0x1p-126f ? y == -HUGE_VALF : x < 0 ? isnan(y) : y == HUGE_VALF;
}

// Non-negative doubles are ordered as their bits are.
__device__ void raise(unsigned long long* place, double value) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
  if (bits > *place) atomicMax(place, bits);
}

template <Function F>
__global__ void sweep(Worst* worst) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 32; i += stride) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(i)), y = fast<F>(x);
    const bool absolute = F == kLg2 && 0.5f <= x && x <= 2.0f;
    const float key = F == kLg2 ? absolute ? x - 1 : 0x1p100f : x;
    const int bin = static_cast<int>(__float_as_uint(key) >> 23 & 0xff);
    const double truth = exact<F>(x);
    const double error = (static_cast<double>(y) - truth) / (absolute ? 1.0 : fabs(truth));
    if (inside<F>(x) ? !(fabs(error) < 1) : !good<F>(x, y)) atomicAdd(&worst->bad[bin], 1ull);
    if (!inside<F>(x)) continue;
    raise(error > 0 ? &worst->above[bin] : &worst->below[bin], fabs(error) * 0x1p24);
    const float next = nextafterf(x, HUGE_VALF), other = fast<F>(next);
    if (inside<F>(next) && (F == kRcp ? other > y : other < y)) {
      atomicAdd(&worst->falls[bin], 1ull);
    }
  }
}

template <Function F>
bool print(const char* title, Worst* on_device) {
  static Worst worst;
  cudaMemset(on_device, 0, sizeof worst);
  sweep<F><<<4096, 256>>>(on_device);
  if (cudaMemcpy(&worst, on_device, sizeof worst, cudaMemcpyDeviceToHost) != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
    return false;
  }
  std::printf("%s\n%10s%12s%12s%12s%8s\n", title, "exponent", "above", "below", "falls", "bad");
  double most[2] = {};
  unsigned long long falls = 0, bad = 0;
  for (int bin = 0; bin < kBins; ++bin) {
    double up, down;
    std::memcpy(&up, &worst.above[bin], sizeof up);
    std::memcpy(&down, &worst.below[bin], sizeof down);
    most[0] = std::fmax(most[0], up), most[1] = std::fmax(most[1], down);
    falls += worst.falls[bin], bad += worst.bad[bin];
    if (up + down > 0 && ((bin >= 100 && bin <= 136) || bin == 227)) {
      std::printf("%10d%12.5f%12.5f%12llu%8llu\n", bin - 127, up, down, worst.falls[bin],
                  worst.bad[bin]);
    }
  }
  std::printf("%10s%12.5f%12.5f%12llu%8llu\n\n", "all", most[0], most[1], falls, bad);
  return true;
}

int main() {
  cudaDeviceProp about;
  Worst* worst;
  if (cudaGetDeviceProperties(&about, 0) != cudaSuccess) return 1;
  if (cudaMalloc(&worst, sizeof *worst) != cudaSuccess) return 1;
  std::printf("%s, CUDA %d\n\n", about.name, CUDART_VERSION);
  const bool done = print<kEx2>("ex2: x in [-126, 128), by the exponent of |x|", worst) &&
                    print<kLg2>("lg2: normal x, by the exponent of |x - 1|", worst) &&
                    print<kRcp>("rcp: 2^-126 <= |x| <= 2^126, by the exponent of |x|", worst);
  return done ? 0 : 1;
}
