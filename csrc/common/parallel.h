// A small pool of std::threads. OpenMP would clash with torch's runtime and survives no fork.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adapmixed::cpu {

// Calls body(context, begin, end) over disjoint ranges that cover [0, count), on at most `threads`
// threads, the calling one among them. Ranges are multiples of `grain` tasks. Denormals are live
// inside the body whatever the caller's flush-to-zero setting, which is restored afterwards.
void parallel_ranges(std::int64_t count, std::int64_t grain, int threads,
                     void (*body)(void*, std::int64_t, std::int64_t), void* context);

// Uninitialised 64-byte aligned memory that this thread owns; valid until the next call with the
// same slot on the same thread, never shrunk below use, released with the thread.
constexpr int kScratchSlots = 2;
double* thread_scratch(std::size_t doubles, int slot = 0);

// Uninitialised doubles for the length of a scope.
class Buffer {
 public:
  explicit Buffer(std::int64_t count);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  double* data() { return data_; }

 private:
  double* data_;
};

// The same as parallel_ranges for a callable. Internal linkage: one instance per translation unit,
// so that builds for different instruction sets share nothing.
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
