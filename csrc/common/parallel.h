// Loops over the threads of torch's own OpenMP. Others would compete with them for the cores: they
// spin for a while after each of torch's operations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adapmixed::cpu {

// Calls body(context, begin, end) over disjoint ranges that cover [0, count). It uses at most
// `threads` threads, including the caller, which is alone in a forked child. Ranges are multiples
// of `grain` tasks. Denormals are on inside the body; the caller's flush-to-zero setting is
// restored afterwards.
void parallel_ranges(std::int64_t count, std::int64_t grain, int threads,
                     void (*body)(void*, std::int64_t, std::int64_t), void* context);

// Uninitialised memory that this thread owns, 64-byte aligned. It is valid until the next call with
// the same slot on the same thread, never shrinks, and is released with the thread.
constexpr int kScratchSlots = 2;
double* thread_scratch(std::size_t doubles, int slot = 0);

// parallel_ranges for a callable. Internal linkage gives each translation unit its own instance, so
// that builds for different instruction sets share nothing.
namespace {
template <class F>
void parallel_for(std::int64_t count, std::int64_t grain, int threads, const F& f) {
  parallel_ranges(
      count, grain, threads,
      [](void* context, std::int64_t begin, std::int64_t end) {
        (*static_cast<const F*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}
}  // namespace

}  // namespace adapmixed::cpu
