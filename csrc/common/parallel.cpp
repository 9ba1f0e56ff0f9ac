#include "common/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace adapmixed::cpu {
namespace {

// A caller's flush-to-zero mode would turn q < 2.2e-308 and small excesses into 0 and under-report
// the loss.
class ExactFloatingPoint {
 public:
#if defined(__x86_64__)
  ExactFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~ExactFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ExactFloatingPoint() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
  }
  ~ExactFloatingPoint() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  std::uint64_t saved_;
#endif
};

// ThreadSanitizer does not see how OpenMP starts and joins its threads.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
void acquire(void* job) { __tsan_acquire(job); }
void release(void* job) { __tsan_release(job); }
#else
void acquire(void*) {}
void release(void*) {}
#endif

struct Job {
  void (*body)(void*, std::int64_t, std::int64_t);
  void* context;
  std::int64_t count;
  std::int64_t grain;
  std::atomic<std::int64_t> next{0};
  std::mutex failure_mutex{};
  std::exception_ptr failure{};

  void run() {
    const ExactFloatingPoint exact;
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      try {
        body(context, begin, std::min(begin + grain, count));
      } catch (...) {
        const std::lock_guard<std::mutex> lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  }
};

// A forked child has none of its parent's threads, and OpenMP would wait for them.
bool forked = false;
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// Calls a function in a team of threads, to which the caller belongs, and waits for all.
using Team = void (*)(void (*function)(void*), void* context, unsigned threads, unsigned flags);

// The OpenMP that torch has loaded, whatever its make; null without one.
Team openmp() {
  static const auto found = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return forked ? nullptr : found;
}

}  // namespace

void parallel_ranges(std::int64_t count, std::int64_t grain, int threads,
                     void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  Job job{body, context, count, grain};
  const std::int64_t size = std::min<std::int64_t>(threads, (count + grain - 1) / grain);
  if (const Team team = size > 1 ? openmp() : nullptr) {
    const auto work = [](void* one) {
      acquire(one);
      static_cast<Job*>(one)->run();
      release(one);
    };
    release(&job);
    team(work, &job, static_cast<unsigned>(size), 0);
    acquire(&job);
  } else {
    job.run();
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

double* thread_scratch(std::size_t doubles, int slot) {
  struct Free {
    void operator()(double* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<double[], Free> memory[kScratchSlots];
  thread_local std::size_t size[kScratchSlots] = {};
  if (size[slot] < doubles) {
    memory[slot].reset();
    size[slot] = 0;
    memory[slot].reset(
        static_cast<double*>(::operator new[](doubles * sizeof(double), std::align_val_t{64})));
    size[slot] = doubles;
  }
  return memory[slot].get();
}

}  // namespace adapmixed::cpu
