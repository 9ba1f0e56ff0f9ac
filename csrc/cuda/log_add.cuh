// Sums of numbers that are known by their logarithms, for warp_reduce.
#pragma once

#include "core/leave_one_out.h"
#include "cuda/runtime.h"

ADAPMIXED_CORE_BEGIN

// log(e^a + e^b), where +inf (a token that one of the two mixtures lacks) stays.
struct LogAdd {
  __device__ double operator()(double a, double b) const {
    return a == HUGE_VAL || b == HUGE_VAL ? HUGE_VAL : log_add(a, b);
  }
};

ADAPMIXED_CORE_END
