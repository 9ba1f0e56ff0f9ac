// The work for one position before the draw: the public log-sum-exps, the weights, the losses.
#include "common/operators.h"

namespace adapmixed::cpu {
namespace {

bool all_ok(const std::int32_t* status, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k) {
    if (status[k] != kRowOk) return false;
  }
  return true;
}

}  // namespace

bool step(const StepInputs& in, double order, double radius, const LeaveOneOutOptions& options,
          const StepResults& out, int threads) {
  const Shape& shape = in.shape;
  log_sum_exp(in.public_logits, 1, shape.positions, shape.vocab, out.public_lse, out.public_status,
              threads);
  if (!all_ok(out.public_status, shape.positions)) return false;
  const ProjectResults& found = out.projection;
  project({shape, in.private_logits, in.public_logits, out.public_lse}, order, radius, found,
          threads);
  if (!all_ok(found.status, shape.models * shape.positions)) return false;
  leave_one_out({shape, in.private_logits, in.public_logits, found.private_lse, out.public_lse},
                {found.weight, found.complement}, options, out.loss, out.balance, threads);
  return true;
}

}  // namespace adapmixed::cpu
