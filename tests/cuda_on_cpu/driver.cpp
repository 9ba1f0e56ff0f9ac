// Runs every CUDA kernel over the small cases of tests/sanitize/dump_cases.py and compares the
// answers. The cases take turns in using three orders of threads. Built with a sanitizer (CMake:
// ADAPMIXED_SIMT with ADAPMIXED_SANITIZE): ThreadSanitizer notices two threads of a block that
// access the same memory without a barrier between them, AddressSanitizer an access outside an
// array.
#include <cstdio>
#include <exception>
#include <vector>

#include "../sanitize/run.h"
#include "simt.h"

namespace {

using sanitize::Case;

constexpr std::int64_t kMostLogits = 1700;
constexpr std::size_t kMostWeights = 4;

struct Simulated : adapmixed::Cuda {
  static constexpr auto log_sum_exp_workspace = &adapmixed::cuda::log_sum_exp_workspace;
  static constexpr auto leave_one_out_workspace = &adapmixed::cuda::leave_one_out_workspace;
  static constexpr auto clip_project_workspace = &adapmixed::cuda::clip_project_workspace;
  static constexpr auto project_workspace = &adapmixed::cuda::project_workspace;
  static constexpr auto log_pool_workspace = &adapmixed::cuda::log_pool_workspace;

  mutable std::vector<char> workspace;

  // The workspace has exactly this size, and is new for every call.
  adapmixed::cuda::Queue where(std::int64_t bytes = 0) const {
    std::vector<char>(static_cast<std::size_t>(bytes), static_cast<char>(0xff)).swap(workspace);
    return {0, nullptr, workspace.data()};
  }
};

// Keeps every third of many weights, different ones in each case. All other options of the case
// stay.
void thin_out(std::vector<sanitize::Weighted>& weighted, std::size_t index) {
  if (weighted.size() <= kMostWeights) return;
  std::vector<sanitize::Weighted> kept;
  for (std::size_t k = index % 3; k < weighted.size(); k += 3) {
    kept.push_back(std::move(weighted[k]));
  }
  weighted = std::move(kept);
}

int run(const char* path, const std::string& name_part) {
  std::vector<Case> cases;
  {
    sanitize::Reader in(path);
    for (std::int64_t left = in.integer(); left > 0; --left) {
      Case next(in);
      const adapmixed::Shape& shape = next.shape;
      if (shape.models * shape.positions * shape.vocab > kMostLogits) continue;
      if (next.name.find(name_part) == std::string::npos) continue;
      thin_out(next.weighted, cases.size());
      cases.push_back(std::move(next));
    }
  }
  const std::pair<const char*, simt::Order> orders[] = {{"forward", simt::Order::forward},
                                                        {"reverse", simt::Order::reverse},
                                                        {"random", simt::Order::random}};
  const Simulated backend;
  for (std::size_t k = 0; k < cases.size(); ++k) {
    const auto& [name, order] = orders[k % 3];
    simt::config.order = order;
    sanitize::Run<Simulated>(cases[k], backend, name).everything();
  }
  const bool good = sanitize::errors == 0 && sanitize::compared > 0;
  std::printf("%s, CUDA kernels: %zu cases in 3 orders of threads, %lld results, %lld errors\n",
              ADAPMIXED_SANITIZE, cases.size(), static_cast<long long>(sanitize::compared.load()),
              static_cast<long long>(sanitize::errors.load()));
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s CASES [PART OF A CASE'S NAME]\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1], argc == 3 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
