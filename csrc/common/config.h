// Included by every header: host and device qualifiers, and the namespace of one build.
//
// The CPU back end compiles the same source once per instruction set. Everything defined in a
// header lives in a namespace named after that instruction set. Two builds therefore share no
// symbol, and the linker cannot give the scalar path an AVX-512 copy of an inline function. The
// CUDA back end's namespace is `device`.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define ADAPMIXED_HD __host__ __device__ inline
// Put before a template that calls its argument. It silences the compiler if the argument exists on
// the device only.
#define ADAPMIXED_HD_CALLBACK _Pragma("nv_exec_check_disable")
#else
#define ADAPMIXED_HD inline
#define ADAPMIXED_HD_CALLBACK
#endif

// For the innermost functions: if they were called, vectors would be passed through memory.
#define ADAPMIXED_HD_INLINE ADAPMIXED_HD __attribute__((always_inline))

// For a lambda that is the body of a loop in several places: if it were called, its vectors would
// be passed through memory.
#define ADAPMIXED_INLINE __attribute__((always_inline))

// For loops over independent vectors: their latencies overlap only if the loop is unrolled.
#if defined(__clang__) || defined(__CUDA_ARCH__)
#define ADAPMIXED_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define ADAPMIXED_UNROLL  // the host's pass knows neither
#else
#define ADAPMIXED_UNROLL _Pragma("GCC unroll 32")
#endif

#ifndef ADAPMIXED_ISA
#define ADAPMIXED_ISA baseline
#endif

#define ADAPMIXED_CORE_BEGIN \
  namespace adapmixed {      \
  namespace ADAPMIXED_ISA {
#define ADAPMIXED_CORE_END \
  }                        \
  }

ADAPMIXED_CORE_BEGIN

// The number of another type with the same bits.
template <class To, class From>
ADAPMIXED_HD To bit_cast(From from) {
  static_assert(std::is_arithmetic_v<From> && sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

ADAPMIXED_CORE_END
