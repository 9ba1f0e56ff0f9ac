"""log_pool: the logarithmic pool of clipped log-ratios, and the distribution answered from it.

u_i(v) = clip(log p_i(v) − log q(v), a, b), a ≤ 0 ≤ b, and p(v) ∝ q(v) exp((κ/N) Σ_i u_i(v)).
q = 0 gives p = 0. N = ``num_models`` counts all members: one that is absent or not active has
u_i = 0.

Without model i log p changes by (κ/N) u_i and a constant. The range of that change over v is at
most κ·span_i/N ≤ κ(b − a)/N. The u_i are multiples of 2^−k in [a, b], so that their sums are exact;
k follows from N, a and b alone and is 40 at most. Over the tokens with p ≥ 2^−1022 rounding adds
at most 2^−49 (1 + κ·max(−a, b) + L) to the range, L the largest −log q among them. The derivation
is in csrc/log_pool/formula.h.
"""

import math
from typing import Any

import torch
from torch import Tensor

from adapmixed import limits

from . import _tensors as check
from ._registry import F64, address, backend, ensemble, register
from .inputs import refuse_targets
from .types import LogPool, raise_row_errors

_ops = torch.ops.adapmixed


# log_pool: (log_normaliser, span, private_lse, public_lse, status, public_status, log_weights)
def _log_pool(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, differences, active, *numbers = args
    results = _log_pool_fake(*args)
    log_normaliser, span, private_lse, public_lse, status, public_status, log_weights = results
    on = backend(private_logits.device)
    shape = tuple(private_logits.shape)
    found = log_normaliser, span, private_lse, status, public_lse, public_status, log_weights
    on.call(
        "log_pool", private_logits, ensemble(private_logits, public_logits, differences),
        (*numbers, address(active)), tuple(map(address, found)),
        workspace=on.workspace("log_pool", shape),
    )  # fmt: skip
    if on.immediate:
        raise_row_errors("public_logits", public_status)
        raise_row_errors("private_logits", status)
    return results


def _log_pool_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits = args[:2]
    span = private_logits.new_empty(private_logits.shape[:2], dtype=F64)
    log_normaliser = public_logits.new_empty(public_logits.shape[:1], dtype=F64)
    found = log_normaliser, span, torch.empty_like(span), torch.empty_like(log_normaliser)
    statuses = (torch.empty_like(like, dtype=torch.int32) for like in (span, log_normaliser))
    return *found, *statuses, public_logits.new_empty(public_logits.shape, dtype=F64)


register(
    "log_pool(Tensor private_logits, Tensor public_logits, Tensor? differences,"
    " Tensor? active, float lower, float upper, float scale, int num_models)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _log_pool,
    _log_pool_fake,
)


def _active(active: Tensor | None, private: Tensor, name: str = "active") -> Tensor | None:
    shape = tuple(private.shape[:2])
    return None if active is None else check.typed(name, active, torch.bool, shape, private)


def log_pool(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    scale: float,
    num_models: int | None = None,
    active: Tensor | None = None,
    lse_differences: Tensor | None = None,
) -> LogPool:
    """Compute the pool's log-normaliser, and the span of each model's clipped log-ratios.

    u_i(v) = clip(log p_i(v) − log q(v), a, b), and p(v) ∝ q(v) exp((κ/N) Σ_i u_i(v)).

    u_i is within 2^−k + 5e-14 + 5e-16 (|lse_i| + |lse_0| + max(−a, b)) of the clipped z_i − lse_i −
    log q, lse_i the ``private_lse`` of the result. That is within 7e-7 of the row's log-sum-exp on
    the CPU, which takes it in single precision, and within 5e-14 on CUDA. It is one number for a
    row: it may move the row's log-ratios inside the clip bounds and never out of them.

    The span is exactly that of the u_i that enter the pool. p_i = 0 < q clips to a.
    Memory: at most 16·V + 2^14 bytes for each thread, and 8·B·V that the result keeps. CUDA takes
    about N·B·V/64 during the call.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        lower: a ≤ 0, a log-ratio.
        upper: b ≥ 0, a log-ratio; b − a ≤ 64.
        scale: κ ≥ 0; above 1 it sharpens what the models agree on. κ (b − a) ≤ 330.
        num_models: public number of members, ≥ N, by which the sum is divided.
        active: (N, B) bool, the members that take part. None: all. Spans are those of all.
        lse_differences: (N, B) float64, each private row's log-sum-exp minus the public row's, if
            they are known: the CPU then reads the rows once. An error of theirs counts as one of
            ``private_lse`` does. CUDA takes its own.

    Returns:
        The log-normaliser, (B,), and the spans, (N, B), both float64 and in nats.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a number outside its range; N = 0 or V = 0; a
            tensor that requires grad; a row with NaN, +inf or no finite value.
    """
    private, public = check.ensemble_logits(private_logits, public_logits)
    lower, upper = limits.check_clip(lower, upper)
    scale, slots = limits.check_scale(scale, lower, upper), check.slots(num_models, private)
    active, known = _active(active, private), lse_differences
    if known is not None:
        known = check.typed("lse_differences", known, F64, tuple(private.shape[:2]), private)
    log_normaliser, span, private_lse, public_lse, status, public_status, log_weights = (
        _ops.log_pool(private, public, known, active, lower, upper, scale, slots)
    )
    return LogPool(
        log_normaliser, span, private_lse, public_lse, lower, upper, scale, slots, active, status,
        log_weights, public_status,
    )  # fmt: skip


# pool_log_prob: (B,)
def _pool_log_prob(log_weights: Tensor, log_normaliser: Tensor, targets: Tensor) -> Tensor:
    vocab = log_weights.shape[-1]
    if backend(targets.device).immediate:
        refuse_targets(targets, vocab)
    inside = (targets >= 0) & (targets < vocab)
    found = log_weights.gather(-1, torch.where(inside, targets, 0)[:, None])[:, 0]
    return torch.where(inside, found - log_normaliser, math.nan)


def _pool_log_prob_fake(log_weights: Tensor, log_normaliser: Tensor, targets: Tensor) -> Tensor:
    return torch.empty_like(log_normaliser)


register(
    "pool_log_prob(Tensor log_weights, Tensor log_normaliser, Tensor targets) -> Tensor",
    _pool_log_prob,
    _pool_log_prob_fake,
)


def _kept(private_logits: Tensor, public_logits: Tensor, pool: LogPool) -> tuple[Tensor, Tensor]:
    _, public = check.ensemble_logits(private_logits, public_logits)
    shapes = {"log_weights": tuple(public.shape), "log_normaliser": tuple(public.shape[:1])}
    weights, normaliser = (
        check.typed(f"projection.{name}", getattr(pool, name), F64, shape, public)
        for name, shape in shapes.items()
    )
    return weights, normaliser


def pool_mixture(private_logits: Tensor, public_logits: Tensor, pool: LogPool) -> Tensor:
    """Compute :func:`adapmixed_ext.mixture` of a LogPool. Internal."""
    weights, normaliser = _kept(private_logits, public_logits, pool)
    return (weights - normaliser.unsqueeze(-1)).exp()


def pool_log_prob(
    private_logits: Tensor, public_logits: Tensor, pool: LogPool, targets: Tensor
) -> Tensor:
    """Compute :func:`adapmixed_ext.log_prob` of a LogPool. Internal."""
    weights, normaliser = _kept(private_logits, public_logits, pool)
    wanted = check.typed("targets", targets, torch.int64, tuple(normaliser.shape), normaliser)
    result: Tensor = _ops.pool_log_prob(weights, normaliser, wanted)
    return result
