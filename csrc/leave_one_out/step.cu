// The work for one position before the draw: the public log-sum-exps, the weights, the losses.
#include <algorithm>

#include "common/operators.h"

namespace adapmixed::cuda {

std::int64_t step_workspace(const Shape& shape, std::int64_t num_orders) {
  return std::max(project_workspace(shape), leave_one_out_workspace(shape, num_orders));
}

bool step(const StepInputs& in, double order, double radius, const LeaveOneOutOptions& options,
          const StepResults& out, const Queue& queue) {
  const Shape& shape = in.shape;
  log_sum_exp(in.public_logits, 1, shape.positions, shape.vocab, out.public_lse, out.public_status,
              queue);
  const ProjectResults& found = out.projection;
  project({shape, in.private_logits, in.public_logits, out.public_lse}, order, radius, found,
          queue);
  leave_one_out({shape, in.private_logits, in.public_logits, found.private_lse, out.public_lse},
                {found.weight, found.complement}, options, out.loss, out.balance, queue);
  return true;
}

}  // namespace adapmixed::cuda
