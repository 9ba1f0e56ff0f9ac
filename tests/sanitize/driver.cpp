// Runs every C++ entry point of the CPU over the cases of dump_cases.py and compares the answers:
// for each instruction set of this machine, with 1, 2 and 3 threads, and from two callers at once.
// Built with sanitizers (CMake: ADAPMIXED_SANITIZE), without Python and torch in the process.
//
// No report is suppressed. The thread pool is never destroyed, but a global points to it, and the
// threads' thread-local storage points to their scratch, so LeakSanitizer counts both as in use.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "run.h"

namespace {

namespace cpu = adapmixed::cpu;
using sanitize::Case;
using sanitize::compared;
using sanitize::errors;
using sanitize::Reader;
using sanitize::Run;

struct Threads : adapmixed::Cpu {
  int threads;

  explicit Threads(int count) : threads(count) {}
  int where(std::int64_t = 0) const { return threads; }
  static std::int64_t log_sum_exp_workspace(const adapmixed::Shape&) { return 0; }
  static std::int64_t clip_project_workspace(const adapmixed::Shape&) { return 0; }
  static std::int64_t project_workspace(const adapmixed::Shape&) { return 0; }
  static std::int64_t leave_one_out_workspace(const adapmixed::Shape&, std::int64_t) { return 0; }
  static std::int64_t log_pool_workspace(const adapmixed::Shape&) { return 0; }
  static std::int64_t mixture_workspace(const adapmixed::Shape&) { return 0; }
  static std::int64_t sample_workspace(std::int64_t, std::int64_t) { return 0; }
};

constexpr int kCallers = 2;
constexpr int kThreadCounts[] = {1, 2, 3};

// Two callers take the cases in turn and meet in the pool. The counter is relaxed and orders
// nothing else, so it cannot hide a race between two calls.
void run_all(const std::vector<Case>& cases, int threads) {
  std::atomic<std::size_t> taken{0};
  std::atomic<bool> failed{false};
  const Threads backend(threads);
  const std::string setting =
      std::string(cpu::instruction_set()) + ", " + std::to_string(threads) + " threads";
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      try {
        for (std::size_t k; (k = taken.fetch_add(1, std::memory_order_relaxed)) < cases.size();) {
          Run<Threads>(cases[k], backend, setting).everything();
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        failed = true;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  if (failed) std::exit(2);
}

int run(const char* path) {
  std::vector<Case> cases;
  {
    Reader in(path);
    for (std::int64_t left = in.integer(); left > 0; --left) cases.emplace_back(in);
  }
  int sets = 0, counts = 0;
  for (const char* name : {"scalar", "avx2", "avx512"}) {
    if (!cpu::use_instruction_set(name)) continue;
    ++sets;
    counts = 0;
    for (const int threads : kThreadCounts) {
      run_all(cases, threads);
      ++counts;
    }
  }
  const bool good = errors == 0 && compared > 0;
  std::printf("%s: %zu cases x %d instruction sets x %d thread counts, %lld results, %lld errors\n",
              ADAPMIXED_SANITIZE, cases.size(), sets, counts,
              static_cast<long long>(compared.load()), static_cast<long long>(errors.load()));
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CASES\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
    return 2;
  }
}
