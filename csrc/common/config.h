// Shared by every header: host + device qualifiers and the namespace of one build.
//
// The CPU back end compiles the same source once per instruction set. Everything defined in a
// header lives in a namespace named after that instruction set: two builds never share a symbol, so
// the linker cannot hand an AVX-512 copy of an inline function to the scalar path.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ADAPMIXED_HD __host__ __device__ inline
// Before a template that calls what it is given: on the device only, if that exists there only.
#define ADAPMIXED_HD_CALLBACK _Pragma("nv_exec_check_disable")
#else
#define ADAPMIXED_HD inline
#define ADAPMIXED_HD_CALLBACK
#endif

// For the innermost functions: as calls, vectors would go through memory.
#define ADAPMIXED_HD_INLINE ADAPMIXED_HD __attribute__((always_inline))

#ifndef ADAPMIXED_ISA
#define ADAPMIXED_ISA baseline
#endif

#define ADAPMIXED_CORE_BEGIN \
  namespace adapmixed {      \
  namespace ADAPMIXED_ISA {
#define ADAPMIXED_CORE_END \
  }                        \
  }
