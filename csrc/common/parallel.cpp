#include "common/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

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

struct Job {
  Job(void (*body_)(void*, std::int64_t, std::int64_t), void* context_, std::int64_t count_,
      std::int64_t grain_)
      : body(body_), context(context_), count(count_), grain(grain_) {}

  void (*body)(void*, std::int64_t, std::int64_t);
  void* context;
  std::int64_t count;
  std::int64_t grain;
  std::atomic<std::int64_t> next{0};
  std::mutex failure_mutex;
  std::exception_ptr failure;

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

class Pool {
 public:
  void run(Job& job, int helpers) {
    const std::lock_guard<std::mutex> one_job_at_a_time(run_mutex_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(threads_.size()) < helpers) {
        const int index = static_cast<int>(threads_.size());
        threads_.emplace_back([this, index] { serve(index); });
        threads_.back().detach();
      }
      job_ = &job;
      helpers_ = helpers;
      running_ = helpers;
      ++generation_;
    }
    wake_.notify_all();
    job.run();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void serve(int index) {
    std::uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen && job_ != nullptr; });
      seen = generation_;
      if (index >= helpers_) continue;
      Job* job = job_;
      lock.unlock();
      job->run();
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int helpers_ = 0;
  int running_ = 0;
  std::uint64_t generation_ = 0;
};

// Never destroyed: detached threads wait on it until the process ends. A forked child gets a new
// pool, because the parent's threads do not exist there and its mutexes may stay locked forever.
std::atomic<Pool*> pool{nullptr};

Pool& current_pool() {
  static const bool registered = [] {
    pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
    return true;
  }();
  (void)registered;
  return *pool.load();
}

}  // namespace

void parallel_ranges(std::int64_t count, std::int64_t grain, int threads,
                     void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  Job job(body, context, count, grain);
  const std::int64_t ranges = (count + grain - 1) / grain;
  const int helpers = static_cast<int>(std::min<std::int64_t>(std::max(threads, 1), ranges)) - 1;
  if (helpers > 0) {
    current_pool().run(job, helpers);
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
