"""The public operators on ensembles: validate, document, call.

Notation: N models, B positions, V tokens, K Rényi orders; q and p_i the softmax of the public and
private logits; p̄_i = λ_i p_i + (1−λ_i) q. Logits are float32, bfloat16 or float16 with any row
stride (one copy is made if the last stride is not 1). Results that carry privacy are float64.
Bad arguments and bad rows raise ValueError. There are no gradients. CUDA calls only queue work, and
can raise for arguments alone: bad rows, and rows that are not those of a projection, have weight 0,
losses and divergences of +inf, probabilities of NaN and the token -1; ``check()`` of a result with
a status raises what the CPU raises at once.
Memory is stated in bytes beyond inputs, that copy and results; on the CPU, threads keep theirs for
their next call. None of it grows with N·V. On CUDA ``project`` takes 18 536·N for each position of
those that share it, as many as fit 64 MiB or one; ``leave_one_out`` at most 64 MiB, or 8·N·
(2K + 1) where that is more, 4096·K, and 16·N + V/4 + 128 for each position of those that share it:
at most 2^26 / (8·N·(2K + 1)) of them, or one; ``step`` the larger of the two.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _library  # noqa: F401  (registers the operators)
from . import _validate as check
from ._types import Clipping, LogPool, Projection
from ._validate import ensemble_logits as ensemble_logits
from .pooling import pool_log_prob, pool_mixture

_ops = torch.ops.adapmixed

# Relative error bound of every divergence and loss; below 1e-12 the bound is absolute, 1e-12.
loss_error: float = 1e-5

Adjacency = Literal["add_remove", "zero_out"]


class Inputs(NamedTuple):
    """Checked logits and their log-sum-exps: what the operators share. Internal."""

    private: Tensor  # (N, B, V)
    public: Tensor  # (B, V)
    private_lse: Tensor  # (N, B) float64
    public_lse: Tensor  # (B,) float64
    status: Tensor  # (N, B) int32
    public_status: Tensor  # (B,) int32


def prepare(private_logits: Tensor, public_logits: Tensor) -> Inputs:
    """Checks the logits and passes over them once."""
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, public_status = _ops.log_sum_exp(public, "public_logits")
    private_lse, status = _ops.log_sum_exp(private, "private_logits")
    status = torch.where(public_status != 0, 5, status)
    return Inputs(private, public, private_lse, public_lse, status, public_status)


def _weighted(
    private_logits: Tensor, public_logits: Tensor, projection: Projection | Clipping | Tensor
) -> tuple[Any, ...]:
    """What operators on a projected ensemble start with: logits, their sums, how to project."""
    if isinstance(projection, Projection | Clipping):
        private, public = check.ensemble_logits(private_logits, public_logits)
        known = (private, public, *check.row_sums(projection, private))
    else:
        known = prepare(private_logits, public_logits)[:4]
    return *known, *check.weights(projection, known[0])


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Projection:
    """λ_i = max{λ ∈ [0,1] : D↔_α(λ p_i + (1−λ) q ‖ q) ≤ R} (Algorithm 1, line 12).

    Always the feasible side: λ is never above the exact optimum. It is within 1e-5 + 1.8e-15
    (|lse_i| + |lse_0|)(α + √(2α/R)) relative of it where (α−1)R ≥ max(1e-8, 1e-9 α, 1e-12 α²) and
    λ ≥ 1e-90 (else rounding takes more of λ, always to the safe side). The second term is rounding
    of the log-sum-exps: nothing beside the first, but where these near 10⁶ at a small R.
    A token masked in the public row but not in the private one gives λ_i = 0.
    Memory: at most 96·V + 2^14 for each thread.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        order: Rényi order α > 1.
        radius: R = βα ≥ 0, in nats.

    Raises:
        ValueError: shapes, dtypes, devices, order ≤ 1, radius < 0 or NaN, N = 0, V = 0, a tensor
            that requires grad, a row with NaN, +inf or no finite value. On CUDA such a row raises
            in ``check()`` of the result only; its weight is 0 before that.
    """
    return project_inputs(private_logits, public_logits, order=order, radius=radius)[1]


def project_inputs(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> tuple[Inputs, Projection]:
    """:func:`project` with the checked logits for further operators."""
    order = check.order("order", order)
    radius = check.number("radius", radius, least=0.0)
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, public_status = _ops.log_sum_exp(public, "public_logits")
    weight, complement, private_lse, status = _ops.project(
        private, public, public_lse, order, radius
    )
    rows = private_lse, public_lse, status, public_status
    return Inputs(private, public, *rows), Projection(weight, complement, *rows)


def _loss_options(
    orders: float | Sequence[float], adjacency: Adjacency
) -> tuple[list[float], bool]:
    """Checked orders, and whether the neighbour is zero-out."""
    values = check.orders(orders, limits=False)
    if adjacency not in ("add_remove", "zero_out"):
        raise ValueError(f"adjacency must be 'add_remove' or 'zero_out', got {adjacency!r}")
    return values, adjacency == "zero_out"


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | Tensor,
    *,
    orders: float | Sequence[float],
    adjacency: Adjacency = "add_remove",
    num_models: int | None = None,
) -> Tensor:
    """D↔_α(p‖p') of every model, position and order (Algorithm 1, line 17; equation 2).

    p = mean_i p̄_i; p' = (N p − p̄_i)/(N−1) for add/remove (q if N = 1), p − (p̄_i − q)/N for
    zero-out. An estimate with relative error at most ``loss_error`` (absolute 1e-12 below that);
    identical models give exactly 0; a loss that cannot be bounded is +inf, never NaN.
    Memory: at most 2048·N + 2^19 for each thread, min(B·S, S + 2^25) with S = 1344·N·(K+4) for the
    sums of the chunks that the vocabulary is cut into, and 64·N·B + 2^16.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection or Clipping of these logits, or a weight tensor (N, B) in [0, 1].
        orders: one order or up to 32 orders, each > 1.
        adjacency: "add_remove" or "zero_out".
        num_models: public number of slots ≥ N; absent slots answer q.

    Returns:
        (N, B, K) float64, in nats: private, for the operator only. +inf where one of the two
        mixtures lacks a token of the other.

    On CUDA nothing is raised for bad data, here or later: where rows are bad (with a weight tensor,
    too, which has no ``check()``) or not those of the projection, or weights outside [0, 1], all
    losses of the position are +inf.
    """
    values, zero_out = _loss_options(orders, adjacency)
    ensemble = _weighted(private_logits, public_logits, projection)
    slots = check.slots(num_models, ensemble[0])
    loss: Tensor = _ops.leave_one_out(*ensemble, values, zero_out, slots)
    return loss


def step(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    order: float,
    radius: float,
    orders: float | Sequence[float],
    adjacency: Adjacency = "add_remove",
    num_models: int | None = None,
) -> tuple[Projection, Tensor]:
    """:func:`project`, then :func:`leave_one_out` of all rows, in one call. Internal.

    The same results bit for bit, and the same errors; arguments as there. For callers that charge
    every row by its projection: nothing may change a weight in between. Memory: at most 96·V +
    2048·N + 2^19 for each thread, and what :func:`leave_one_out` states besides.
    """
    order = check.order("order", order)
    radius = check.number("radius", radius, least=0.0)
    values, zero_out = _loss_options(orders, adjacency)
    private, public = check.ensemble_logits(private_logits, public_logits)
    slots = check.slots(num_models, private)
    *found, loss = _ops.step(private, public, order, radius, values, zero_out, slots)
    return Projection(*found), loss


def mixture(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
) -> Tensor:
    """p = mean_i p̄_i, the distribution the token is drawn from (Algorithm 1, line 15).

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].

    Returns:
        (B, V) float64; rows sum to 1 up to rounding. On CUDA nothing is raised for bad data, here
        or later: where rows are bad (with a weight tensor, too, which has no ``check()``) or not
        those of the projection, or weights outside [0, 1], the whole row is NaN.
    """
    if isinstance(projection, LogPool):
        return pool_mixture(private_logits, public_logits, projection)
    p: Tensor = _ops.mixture(*_weighted(private_logits, public_logits, projection))
    return p


def log_prob(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | LogPool | Tensor,
    targets: Tensor,
) -> Tensor:
    """log p(target) without forming (B, V): what a perplexity needs.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        projection: a Projection, Clipping or LogPool of these logits, or a weight tensor (N, B) in
            [0, 1].
        targets: (B,) int64, tokens in [0, V).

    Returns:
        (B,) float64, in nats; −inf where the mixture cannot produce the target. Evaluation only:
        a log-probability of the mixture is private. Only the targets' logits are read: with a
        Projection the rows are taken to be those that it was made from. On CUDA nothing is raised
        for bad data, here or later: for a target outside [0, V), bad rows (with a weight tensor,
        too, which has no ``check()``) and weights outside [0, 1] it is NaN.
    """
    if isinstance(projection, LogPool):
        return pool_log_prob(private_logits, public_logits, projection, targets)
    ensemble = _weighted(private_logits, public_logits, projection)
    positions = tuple(ensemble[1].shape[:1])
    wanted = check.typed("targets", targets, torch.int64, positions, ensemble[0])
    result: Tensor = _ops.log_prob(*ensemble, wanted)
    return result
