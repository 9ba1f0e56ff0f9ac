"""mixture and log_prob: the distribution that the token is drawn from."""

from typing import Any

import torch
from torch import Tensor

from . import _tensors as check
from ._log_pool import pool_log_prob, pool_mixture
from ._registry import F64, WEIGHTED, backend, register, weighted
from .inputs import refuse_foreign, refuse_targets, weighted_inputs
from .types import Clipping, LogPool, Projection

_ops = torch.ops.adapmixed


# mixture: (B, V)
def _mixture(*args: Any) -> Tensor:
    result = _mixture_fake(*args)
    on = backend(result.device)
    memory = on.workspace("mixture", tuple(args[0].shape))
    on.call("mixture", args[0], *weighted(*args), result.data_ptr(), workspace=memory)
    if on.immediate:
        refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _mixture_fake(*args: Any) -> Tensor:
    public_logits: Tensor = args[1]
    return public_logits.new_empty(public_logits.shape, dtype=F64)


register(f"mixture({WEIGHTED}) -> Tensor", _mixture, _mixture_fake)


def mixture(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
) -> Tensor:
    """Compute the mixture p that the token is drawn from (Algorithm 1, line 14).

    p = mean_i p̄_i for a Projection, a Clipping or weights; the pool's p for a LogPool. On CUDA
    nothing is raised for bad data, here or later. A whole row of the result is NaN if its logits
    are bad or do not belong to the projection, or if a weight is outside [0, 1]. A LogPool gives
    its p whatever the logits are by now.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].

    Returns:
        (B, V) float64; rows sum to 1 up to rounding. It is private.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a weight outside [0, 1]; bad rows, or rows that
            do not belong to the projection.
    """
    if isinstance(projection, LogPool):
        return pool_mixture(private_logits, public_logits, projection)
    known = weighted_inputs(private_logits, public_logits, projection, by_kernel=False)
    p: Tensor = _ops.mixture(*known)
    return p


# log_prob: (B,)
def _log_prob(*args: Any) -> Tensor:
    *inputs, targets = args
    on = backend(targets.device)
    if on.immediate:
        refuse_targets(targets, args[1].shape[-1])
    result = _log_prob_fake(*args)
    on.call("log_prob", args[0], *weighted(*inputs), targets.data_ptr(), result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~(result <= 1e-6))
    return result


def _log_prob_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[3])


register(f"log_prob({WEIGHTED}, Tensor targets) -> Tensor", _log_prob, _log_prob_fake)


def log_prob(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
    targets: Tensor,
) -> Tensor:
    """Compute log p(target) for a perplexity, without forming p.

    For evaluation only: a log-probability of the mixture is private. Only the targets' logits are
    read, and none for a LogPool, so the rows must be those that the projection was made from. On
    CUDA nothing is raised for bad data, here or later. The result is NaN for a target outside
    [0, V), for bad rows, and for weights outside [0, 1].

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].
        targets: (B,) int64, tokens in [0, V).

    Returns:
        (B,) float64, in nats; −inf if the mixture cannot produce the target.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a target outside [0, V); a weight outside
            [0, 1]; log p > 0, which shows that the rows do not belong to the projection.
    """
    if isinstance(projection, LogPool):
        return pool_log_prob(private_logits, public_logits, projection, targets)
    ensemble = weighted_inputs(private_logits, public_logits, projection)
    positions = tuple(ensemble[1].shape[:1])
    wanted = check.typed("targets", targets, torch.int64, positions, ensemble[0])
    result: Tensor = _ops.log_prob(*ensemble, wanted)
    return result
