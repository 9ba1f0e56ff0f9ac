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

from typing import Any

import torch
from torch import Tensor

from adapmixed import limits

from . import _tensors as check
from ._registry import ENSEMBLE, F64, address, backend, ensemble, queues, register
from .inputs import refuse_foreign, refuse_targets
from .types import LogPool, raise_row_errors

_ops = torch.ops.adapmixed

_OPTIONS = "Tensor? active, float lower, float upper, float scale, int num_models"


def _options(active: Tensor | None, *numbers: Any) -> tuple[float | int, ...]:
    return (*numbers, address(active))


# log_pool: (log_normaliser, span, private_lse, public_lse, status, public_status, log_weights);
# the last one is (B (V + 1),), log p + log_normaliser and then log_normaliser, or (0,).
def _log_pool(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, differences, *options, _ = args
    results = _log_pool_fake(*args)
    log_normaliser, span, private_lse, public_lse, status, public_status, log_weights = results
    on = backend(private_logits.device)
    shape = tuple(private_logits.shape)
    found = log_normaliser, span, private_lse, status, public_lse, public_status, log_weights
    on.call(
        "log_pool", private_logits, ensemble(private_logits, public_logits, differences),
        _options(*options), tuple(map(address, found)),
        workspace=on.workspace("log_pool", shape),
    )  # fmt: skip
    if on.immediate:
        raise_row_errors("public_logits", public_status)
        raise_row_errors("private_logits", status)
    return results


def _log_pool_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, *_, keep = args
    span = private_logits.new_empty(private_logits.shape[:2], dtype=F64)
    log_normaliser = public_logits.new_empty(public_logits.shape[:1], dtype=F64)
    found = log_normaliser, span, torch.empty_like(span), torch.empty_like(log_normaliser)
    statuses = (torch.empty_like(like, dtype=torch.int32) for like in (span, log_normaliser))
    positions, vocab = public_logits.shape
    kept = keep or queues(public_logits.device)
    size = positions * (vocab + 1) if kept else 0
    return *found, *statuses, public_logits.new_empty(size, dtype=F64)


register(
    "log_pool(Tensor private_logits, Tensor public_logits, Tensor? differences,"
    f" {_OPTIONS}, bool keep)"
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
    keep: bool = False,
    lse_differences: Tensor | None = None,
) -> LogPool:
    """Compute the pool's log-normaliser, and the span of each model's clipped log-ratios.

    u_i(v) = clip(log p_i(v) − log q(v), a, b), and p(v) ∝ q(v) exp((κ/N) Σ_i u_i(v)).

    u_i is within 2^−k + 5e-14 + 5e-16 (|lse_i| + |lse_0| + max(−a, b)) of the clipped z_i − lse_i −
    log q, lse_i the ``private_lse`` of the result. That is within 7e-7 of the row's log-sum-exp on
    the CPU, which takes it in single precision, and within 5e-14 on CUDA. It is one number for a
    row: it may move the row's log-ratios inside the clip bounds and never out of them.

    The span is exactly that of the u_i that enter the pool. p_i = 0 < q clips to a.
    Memory: at most 16·V + 2^14 bytes for each thread, and 8·B·(V + 1) that the result keeps with
    ``keep``. CUDA always keeps them, and takes about N·B·V/64 more during the call.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        lower: a ≤ 0, a log-ratio.
        upper: b ≥ 0, a log-ratio; b − a ≤ 64.
        scale: κ ≥ 0; above 1 it sharpens what the models agree on. κ (b − a) ≤ 330.
        num_models: public number of members, ≥ N, by which the sum is divided.
        active: (N, B) bool, the members that take part. None: all. Spans are those of all.
        keep: keep the pool's log-weights, so that ``mixture`` need not read the rows again. On the
            CPU its result has the same bits. CUDA always keeps them.
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
    if not isinstance(keep, bool):
        raise ValueError(f"keep must be True or False, got {keep!r}")
    log_normaliser, span, private_lse, public_lse, status, public_status, log_weights = (
        _ops.log_pool(private, public, known, active, lower, upper, scale, slots, keep)
    )
    pool = LogPool(
        log_normaliser, span, private_lse, public_lse, lower, upper, scale, slots, active, status,
        public_status,
    )  # fmt: skip
    if log_weights.numel():
        object.__setattr__(pool, "_log_weights", log_weights)
    return pool


# pool_mixture: (B, V)
def _pool_mixture(*args: Any) -> Tensor:
    *tensors, log_normaliser = args[:5]
    result = _pool_mixture_fake(*args)
    on = backend(result.device)
    on.call(
        "pool_mixture", result, ensemble(*tensors), _options(*args[5:]), log_normaliser.data_ptr(),
        result.data_ptr(), workspace=on.workspace("mixture", tuple(tensors[0].shape)),
    )  # fmt: skip
    if on.immediate:
        refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _pool_mixture_fake(*args: Any) -> Tensor:
    result: Tensor = args[1].new_empty(args[1].shape, dtype=F64)
    return result


register(
    f"pool_mixture({ENSEMBLE}, Tensor log_normaliser, {_OPTIONS}) -> Tensor",
    _pool_mixture,
    _pool_mixture_fake,
)


# pool_probabilities: (B, V), pool_mixture of the rows that log_pool has read
def _pool_probabilities(log_weights: Tensor, log_normaliser: Tensor, vocab: int) -> Tensor:
    result = _pool_probabilities_fake(log_weights, log_normaliser, vocab)
    on = backend(result.device)
    inputs = log_weights.data_ptr(), log_normaliser.data_ptr(), *result.shape
    on.call("pool_probabilities", result, *inputs, result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~((result.sum(-1) - 1.0).abs() <= 1e-6))
    return result


def _pool_probabilities_fake(log_weights: Tensor, log_normaliser: Tensor, vocab: int) -> Tensor:
    return log_weights.new_empty((log_normaliser.shape[0], vocab))


register(
    "pool_probabilities(Tensor log_weights, Tensor log_normaliser, SymInt vocab) -> Tensor",
    _pool_probabilities,
    _pool_probabilities_fake,
)


# pool_log_prob: (B,)
def _pool_log_prob(*args: Any) -> Tensor:
    *tensors, log_normaliser, targets = args[:6]
    vocab = args[1].shape[-1]
    on = backend(targets.device)
    if on.immediate:
        refuse_targets(targets, vocab)
    result = _pool_log_prob_fake(*args)
    inputs = ensemble(*tensors), _options(*args[6:]), log_normaliser.data_ptr()
    on.call("pool_log_prob", result, *inputs, targets.data_ptr(), result.data_ptr())
    if on.immediate:
        refuse_foreign("position ", ~(result <= 1e-6))
    return result


def _pool_log_prob_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[4])


register(
    f"pool_log_prob({ENSEMBLE}, Tensor log_normaliser, Tensor targets, {_OPTIONS}) -> Tensor",
    _pool_log_prob,
    _pool_log_prob_fake,
)


def _pooled(private_logits: Tensor, public_logits: Tensor, pool: LogPool) -> tuple[object, ...]:
    """Return the ensemble's five tensors, and the options behind them."""
    private, public = check.ensemble_logits(private_logits, public_logits)
    models, positions = private.shape[:2]
    of_rows = check.typed(
        "projection.private_lse", pool.private_lse, torch.float64, (models, positions), private
    )
    of_positions = (
        check.typed(f"projection.{name}", getattr(pool, name), torch.float64, (positions,), private)
        for name in ("public_lse", "log_normaliser")
    )
    return (
        private, public, of_rows, *of_positions,
        _active(pool.active, private, "projection.active"),
        pool.lower, pool.upper, pool.scale, pool.num_models,
    )  # fmt: skip


def pool_mixture(private_logits: Tensor, public_logits: Tensor, pool: LogPool) -> Tensor:
    """Compute :func:`adapmixed_ext.mixture` of a LogPool. Internal."""
    log_weights = pool._log_weights
    if log_weights is None:
        p: Tensor = _ops.pool_mixture(*_pooled(private_logits, public_logits, pool))
        return p
    _, public = check.ensemble_logits(private_logits, public_logits)
    positions, vocab = public.shape
    log_weights = check.typed("projection", log_weights, F64, (positions * (vocab + 1),), public)
    log_normaliser = check.typed(
        "projection.log_normaliser", pool.log_normaliser, F64, (positions,), public
    )
    p = _ops.pool_probabilities(log_weights, log_normaliser, vocab)
    return p


def pool_log_prob(
    private_logits: Tensor, public_logits: Tensor, pool: LogPool, targets: Tensor
) -> Tensor:
    """Compute :func:`adapmixed_ext.log_prob` of a LogPool. Internal."""
    known = _pooled(private_logits, public_logits, pool)
    positions = tuple(public_logits.shape[:1])
    wanted = check.typed("targets", targets, torch.int64, positions, private_logits)
    result: Tensor = _ops.pool_log_prob(*known[:5], wanted, *known[5:])
    return result
