// Operators whose kernels are not written yet.
#include <stdexcept>

#include "core/ops.h"

#define MISSING __attribute__((weak))
namespace adapmixed::cuda {
namespace {
[[noreturn]] void missing() { throw std::runtime_error("no kernel yet"); }
}  // namespace
MISSING void project(const ProjectInputs&, double, double, const ProjectResults&, const Queue&) {
  missing();
}
MISSING std::int64_t leave_one_out_workspace(const Shape&, std::int64_t) { return 0; }
MISSING void leave_one_out(const Ensemble&, const Weights&, const LeaveOneOutOptions&, double*,
                           double*, const Queue&) {
  missing();
}
MISSING bool step(const StepInputs&, double, double, const LeaveOneOutOptions&, const StepResults&,
                  const Queue&) {
  missing();
}
MISSING void mixture(const Ensemble&, const Weights&, double*, const Queue&) { missing(); }
MISSING void log_prob(const Ensemble&, const Weights&, const std::int64_t*, double*, const Queue&) {
  missing();
}
MISSING void renyi_divergence(const Ensemble&, const double*, std::int64_t, double*, double*,
                              const Queue&) {
  missing();
}
MISSING std::int64_t screen_workspace(const Shape&, std::int64_t) { return 0; }
MISSING void screen(const Ensemble&, const ScreenOptions&, double*, bool*, const Queue&) {
  missing();
}
MISSING void gaussian(const std::uint8_t*, std::uint64_t, double, std::int64_t, double*,
                      const Queue&) {
  missing();
}
MISSING void sample(const double*, const Logits&, std::int64_t, std::int64_t, const std::uint8_t*,
                    std::uint64_t, std::int64_t*, std::int32_t*, const Queue&) {
  missing();
}
}  // namespace adapmixed::cuda
