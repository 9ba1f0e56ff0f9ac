"""What the ranks of a spread ensemble add up before :func:`adapmixed_ext.leave_one_out`."""

import torch
from torch import Tensor

from . import _validate as check
from ._types import Projection


def density_ratio_sum(
    private_logits: Tensor, public_logits: Tensor, projection: Projection
) -> Tensor:
    """Σ_i p̄_i/q over this rank's models.

    With R the sum over all ranks, divided by ``num_models``, the mixture is q R and R − 1 is the
    ``mean_excess`` of :func:`adapmixed_ext.leave_one_out`. Ratios are summed rather than excesses
    since R keeps its relative accuracy where it is far below 1. A row that is equal to q and has
    its log-sum-exp gives exactly 1, and so does every row where q = 0. In plain torch, a model at a
    time: 40·B·V bytes beside the result.

    Args:
        private_logits, public_logits: (N, B, V) of this rank's models, and (B, V).
        projection: of these logits.

    Returns:
        (B, V) float64, within 1e-12 relative where log-ratios are below 10³; private. +inf where it
        is beyond the range of float64, which ``leave_one_out`` refuses.
    """
    private, public = check.ensemble_logits(private_logits, public_logits)
    private_lse, public_lse = check.row_sums(projection, private)
    log_q = public.double() - public_lse.unsqueeze(-1)
    masked = torch.isneginf(public)
    total = torch.zeros_like(log_q)
    for model, rows in enumerate(private):
        log_ratio = rows.double() - private_lse[model].unsqueeze(-1) - log_q
        same = masked | (log_ratio == 0.0)
        # Not weight times ratio: the ratio alone may be beyond the range where the product is not.
        log_ratio += projection.weight[model].log().unsqueeze(-1)
        ratio = log_ratio.exp_().add_(projection.complement[model].unsqueeze(-1))
        total += ratio.masked_fill_(same, 1.0)
    return total
