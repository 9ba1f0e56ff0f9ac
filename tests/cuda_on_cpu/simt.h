// The part of CUDA that our kernels use, on a CPU. It replaces the CUDA runtime if ADAPMIXED_SIMT
// is defined (csrc/common/runtime.cuh), so that g++ compiles the kernels' own source.
//
// One block runs at a time. Each of its threads is a fibre that runs until it meets a barrier or a
// warp operation. The order of the threads is a setting: a kernel that lacks a barrier gives other
// or wrong results in another order. Behaviour that is undefined on a GPU is an error here: threads
// that wait for each other forever, warp operations that name absent lanes, and lanes that meet at
// different operations. ThreadSanitizer sees fibres as threads, and barriers as the only
// synchronisation.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// An operating-system thread runs one block at a time.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim, gridDim;

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorInsufficientDriver,
  cudaErrorNoDevice,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
  cudaErrorInvalidValue,
  cudaErrorUnknown
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline const char* cudaGetErrorName(cudaError_t error) {
  constexpr const char* kNames[] = {
      "cudaSuccess",
      "cudaErrorInsufficientDriver",
      "cudaErrorNoDevice",
      "cudaErrorNoKernelImageForDevice",
      "cudaErrorInvalidDeviceFunction",
      "cudaErrorInvalidValue",
      "cudaErrorUnknown",
  };
  return kNames[error];
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

// The line of the call, for error messages.
#define SIMT_LINE int line = __builtin_LINE()

namespace simt {

// The shared memory of a block in bytes: the maximum of an H100; the limit for a kernel that has
// not asked for more; and the assumed static memory of our kernels, which cannot be determined
// here. No kernel with dynamic memory has more (tests/cuda/test_without_gpu.py reads it from the
// machine code).
constexpr std::size_t kMostShared = 227 * 1024, kUnaskedShared = 48 * 1024;
constexpr std::size_t kStaticShared = 4096;
// Allows the kernel this much dynamic memory (scheduler.cpp).
void allow_shared(const void* kernel, std::size_t bytes);
// The limits that have been set, one per kernel.
std::vector<std::size_t> shared_limits();

enum class Order { forward, reverse, random };

enum class Errors { up, down, random };

struct Config {
  Order order = Order::forward;
  unsigned seed = 0;
  Errors errors = Errors::random;  // of what a GPU only approximates
  bool sizes_of_a_gpu = false;     // csrc/common/runtime.cuh
};
inline Config config;

// The number `steps` floats above or below, or at random within that.
inline float off(float value, int steps) {
  if (!std::isfinite(value)) return value;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const int random = static_cast<int>((bits * 2654435761u >> 8) % (2u * steps + 1u)) - steps;
  int left = config.errors == Errors::up ? steps : config.errors == Errors::down ? -steps : random;
  for (; left > 0; --left) value = std::nextafter(value, HUGE_VALF);
  for (; left < 0; ++left) value = std::nextafter(value, -HUGE_VALF);
  return value;
}
inline float near_reciprocal(float x) { return off(1.0f / x, 1); }
inline float near_exp2(float x) { return off(std::exp2(x), 2); }
inline float near_log2(float x) { return off(std::log2(x), 1); }

// Called by fibres (scheduler.cpp).
void sync_block(int line);
void sync_warp(unsigned mask, int line);
bool vote_block(bool vote, int line, int* count);
// Waits for the lanes of `mask`. Afterwards result[lane] is the value that each of them passed.
const std::uint64_t* exchange(unsigned mask, int operation, std::uint64_t value, int line);
int lane();
[[noreturn]] void fail(const std::string& what, int line);
void* dynamic_shared();
// Called by atomicExch for a word that all blocks of the grid share; see Late in scheduler.cpp.
void exchanged(std::int32_t* address, std::int32_t before, std::int32_t after);
// The copies of one thread from global to shared memory that have not arrived. They arrive when the
// thread waits for them or, in reverse order, at once: a kernel must bear both.
struct Copies {
  struct Copy {
    char* to;
    const char* from;
  };
  std::vector<Copy> copies;
  std::vector<std::size_t> ends;  // of its groups
};
Copies& copies();
void run(const std::function<void()>& call, const void* kernel, dim3 grid, dim3 block,
         std::size_t shared);
// The kernels and the memsets that have been queued.
std::size_t launches();
std::size_t memsets();
void count_memset();

template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, P... arguments) {
  run([=] { kernel(arguments...); }, reinterpret_cast<const void*>(kernel), grid, block, shared);
}

template <class T>
std::uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T shuffle(unsigned mask, T value, int source, int line) {
  const std::uint64_t* brought = exchange(mask, 1, pack(value), line);
  if (!(mask >> source & 1u)) fail("a shuffle reads a lane outside its mask", line);
  return unpack<T>(brought[source]);
}

inline void arrive(const Copies::Copy& copy) {
  for (int k = 0; k < 16; ++k) copy.to[k] = copy.from[k];
}
inline void copy_later(void* to, const void* from, SIMT_LINE) {
  if ((pack(to) | pack(from)) % 16 != 0) fail("an unaligned copy", line);
  const Copies::Copy copy{static_cast<char*>(to), static_cast<const char*>(from)};
  if (config.order == Order::reverse) return arrive(copy);
  copies().copies.push_back(copy);
}
inline void end_copies() { copies().ends.push_back(copies().copies.size()); }
inline void await_copies(std::size_t later) {
  Copies& sent = copies();
  std::size_t done = 0;
  for (; sent.ends.size() > later; sent.ends.erase(sent.ends.begin())) {
    for (; done < sent.ends.front(); ++done) arrive(sent.copies[done]);
  }
  sent.copies.erase(sent.copies.begin(), sent.copies.begin() + static_cast<std::ptrdiff_t>(done));
  for (std::size_t& end : sent.ends) end -= done;
}

}  // namespace simt

inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return simt::count_memset(), cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = static_cast<int>(simt::kMostShared), cudaSuccess;
}
struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  return found->sharedSizeBytes = simt::kStaticShared, cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  const auto wanted = static_cast<std::size_t>(bytes);
  if (bytes < 0 || wanted + simt::kStaticShared > simt::kMostShared) return cudaErrorInvalidValue;
  return simt::allow_shared(kernel, wanted), cudaSuccess;
}

inline void __syncthreads(SIMT_LINE) { simt::sync_block(line); }
inline int __syncthreads_count(int vote, SIMT_LINE) {
  int count = 0;
  simt::vote_block(vote != 0, line, &count);
  return count;
}
inline int __syncthreads_or(int vote, SIMT_LINE) { return __syncthreads_count(vote, line) != 0; }
// One block runs at a time, and a block's own threads need a barrier.
inline void __threadfence() { asm volatile("" ::: "memory"); }
// What a block waits for was done by an earlier one, or never is.
inline void __nanosleep(unsigned, SIMT_LINE) {
  simt::fail("a block waits for another one that does not run", line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_LINE) { simt::sync_warp(mask, line); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_LINE) {
  const int first = simt::lane() & ~(width - 1);
  return simt::shuffle(mask, value, first | (source & (width - 1)), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_LINE) {
  const int lane = simt::lane(), source = lane ^ bits;
  return simt::shuffle(mask, value, source / width > lane / width ? lane : source, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LINE) {
  const int lane = simt::lane(), source = lane + static_cast<int>(by);
  return simt::shuffle(mask, value, source / width == lane / width ? source : lane, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LINE) {
  const int lane = simt::lane(), within = lane & (width - 1);
  return simt::shuffle(mask, value,
                       within >= static_cast<int>(by) ? lane - static_cast<int>(by) : lane, line);
}
inline unsigned __ballot_sync(unsigned mask, int vote, SIMT_LINE) {
  const std::uint64_t* votes = simt::exchange(mask, 2, vote != 0, line);
  unsigned result = 0;
  for (int k = 0; k < 32; ++k) result |= static_cast<unsigned>(votes[k] & 1) << k;
  return result & mask;
}
inline int __any_sync(unsigned mask, int vote, SIMT_LINE) {
  return __ballot_sync(mask, vote, line) != 0;
}
inline int __all_sync(unsigned mask, int vote, SIMT_LINE) {
  return __ballot_sync(mask, !vote, line) == 0;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcv(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

// Integers only: our kernels have no atomic operations on floating-point numbers.
template <class T>
std::enable_if_t<std::is_integral<T>::value, T> atomicAdd(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <class T>
std::enable_if_t<std::is_integral<T>::value, T> atomicOr(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline std::int32_t atomicExch(std::int32_t* address, std::int32_t value) {
  const std::int32_t before = __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
  simt::exchanged(address, before, value);
  return before;
}
template <class T>
std::enable_if_t<std::is_integral<T>::value, T> atomicMax(T* address, std::common_type_t<T> value) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, T(value), false,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
