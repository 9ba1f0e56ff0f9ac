// Runs every CUDA kernel over the small cases of tests/sanitize/dump_cases.py, in three orders of
// its threads, and compares the answers. Built with a sanitizer (CMake: ADAPMIXED_SIMT with
// ADAPMIXED_SANITIZE): ThreadSanitizer sees two threads of a block that touch the same memory
// without a barrier between them, AddressSanitizer what lies outside an array.
#include <cstdio>
#include <exception>
#include <vector>

#include "../sanitize/run.h"
#include "simt.h"

namespace {

using sanitize::Case;

constexpr std::int64_t kMostLogits = 1500;

struct Simulated : adapmixed::Cuda {
  static constexpr auto leave_one_out_workspace = &adapmixed::cuda::leave_one_out_workspace;
  static constexpr auto screen_workspace = &adapmixed::cuda::screen_workspace;

  mutable std::vector<char> workspace;

  // Of exactly this size, and new for every call.
  adapmixed::cuda::Queue where(std::int64_t bytes = 0) const {
    std::vector<char>(static_cast<std::size_t>(bytes), static_cast<char>(0xff)).swap(workspace);
    return {0, nullptr, workspace.data()};
  }
};

int run(const char* path) {
  std::vector<Case> cases;
  {
    sanitize::Reader in(path);
    for (std::int64_t left = in.integer(); left > 0; --left) {
      Case next(in);
      const adapmixed::Shape& shape = next.shape;
      if (shape.models * shape.positions * shape.vocab <= kMostLogits) {
        cases.push_back(std::move(next));
      }
    }
  }
  const std::pair<const char*, simt::Order> orders[] = {{"forward", simt::Order::forward},
                                                        {"reverse", simt::Order::reverse},
                                                        {"random", simt::Order::random}};
  for (const auto& [name, order] : orders) {
    simt::config.order = order;
    const Simulated backend;
    for (const Case& one : cases) sanitize::Run<Simulated>(one, backend, name).everything();
  }
  const bool good = sanitize::errors == 0 && sanitize::compared > 0;
  std::printf("%s, CUDA kernels: %zu cases x 3 orders of threads, %lld results, %lld errors\n",
              ADAPMIXED_SANITIZE, cases.size(), static_cast<long long>(sanitize::compared.load()),
              static_cast<long long>(sanitize::errors.load()));
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
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
